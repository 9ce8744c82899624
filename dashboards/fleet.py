"""The dashboard of all runs: their states, pace, goodput, losses and findings."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dashboards.panels import (
    OVER,
    RUN,
    SEVERITIES,
    TOP,
    Row,
    bars,
    color_of,
    lines,
    number,
    of_runs,
    over_range,
    states,
    top,
)
from dashboards.tables import findings

_STATES = {
    "running": "green",
    "finished": "blue",
    "interrupted": "purple",
    "stalled": "orange",
    "hung": "red",
    "failed": "dark-red",
    "lost": "semi-dark-red",
}


def fleet() -> dashboard.Dashboard:
    """Return the dashboard."""
    title, uid = "ddpobs: fleet", "ddpobs-fleet"
    return of_runs(title, uid, "All runs: which of them needs attention.", _rows(), every=True)


def states_of_runs() -> str:
    """Return the position of each run's state in the list of states, from 1."""
    numbered = (f'ddpobs_run_state{{{RUN},state="{state}"}} * {n}' for n, state in enumerate(_STATES, 1))
    return f"max by (run) ({' or '.join(numbered)})"


def _largest(expr: str) -> str:
    """The runs with the most steps of all ranks in the time range."""
    return top(expr, "run", over_range("ddpobs_steps_total", RUN, "run"))


def _rows() -> list[Row]:
    lost = (
        f"sum by (run) (ddpobs_phase_seconds_total{{{RUN}}}) "
        f"* on (run) (1 / (ddpobs_goodput_ratio{{{RUN}}} > 0) - 1) / 3600"
    )
    waited = f"sum by (run) (ddpobs_comm_wait_seconds_total{{{RUN}}}) / 3600"
    severities = number(
        "Findings by severity",
        f"sum by (severity) (ddpobs_findings{{{RUN}}})",
        "short",
        24,
        "Open findings of all runs. Critical ones cost a quarter of the time or more.",
        legend="{{severity}}",
    )
    for severity, color in SEVERITIES.items():
        severities = severities.override_by_name(severity, [color_of(color)])
    return [
        (
            "Runs",
            [
                states(
                    "States",
                    _largest(states_of_runs()),
                    "{{run}}",
                    _STATES,
                    "State of the largest runs. running is good; hung, failed, lost and stalled are bad; a person ends "
                    "a run as interrupted.",
                ),
                findings(24),
                severities.height(4),
            ],
        ),
        (
            "Pace",
            [
                lines(
                    "Steps a second, by run",
                    [(_largest(f"avg by (run) (rate(ddpobs_steps_total{{{RUN}}}[{OVER}]))"), "{{run}}")],
                    "short",
                    "The largest runs. A level line is good. A drop begins a slow stretch, and a gap is a restart or a "
                    "hang.",
                ),
                lines(
                    "Goodput",
                    [(_largest(f"max by (run) (ddpobs_goodput_ratio{{{RUN}}})"), "{{run}}")],
                    "percentunit",
                    "Share of the wall time in steps that no restart repeated. 90 % is good, below 50 % is bad.",
                    bounds=(0.9, 0.5),
                ),
                bars(
                    "Rank-hours lost, by run",
                    f"topk({TOP}, {lost})",
                    "h",
                    "Hours of all ranks outside of productive steps, from goodput and the time in steps. "
                    "Small is good.",
                    legend="{{run}}",
                ),
                bars(
                    "Rank-hours waiting for the last rank, by run",
                    f"topk({TOP}, {waited})",
                    "h",
                    "Hours in which ranks waited for the slowest one, in the compared steps. Small is good.",
                    legend="{{run}}",
                ),
            ],
        ),
        (
            "Twelve weeks",
            [
                number(
                    "Rank-hours",
                    "max(ddpobs_fleet_rank_seconds) / 3600",
                    "h",
                    24,
                    "Hours of all ranks of the workspace's runs, also of those that have ended.",
                    legend="rank-hours",
                ).height(4),
                bars(
                    "Rank-hours lost, by cause",
                    f"topk({TOP}, max by (cause) (ddpobs_fleet_lost_seconds)) / 3600",
                    "h",
                    "Hours of all ranks in the lost parts of the account. Small is good.",
                    legend="{{cause}}",
                ),
                bars(
                    "Slow hosts",
                    f"topk({TOP}, max by (host) (ddpobs_fleet_slow_host_ratio)) "
                    'or label_replace(max(ddpobs_fleet_compared_runs) * 0, "host", "none", "", "")',
                    "percentunit",
                    "Hosts that are the slowest of their jobs more often than by chance: how late they are, as a share "
                    "of a step. None is good, if runs on several hosts were compared.",
                    legend="{{host}}",
                ),
            ],
        ),
    ]
