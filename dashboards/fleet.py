"""The dashboard of all runs: their states, pace, goodput, losses and findings."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dashboards.panels import OVER, RUN, Row, bars, lines, number, of_runs, rows_of


def fleet() -> dashboard.Dashboard:
    """Return the dashboard."""
    return of_runs("ddpobs: fleet", "ddpobs-fleet", "All runs: which of them needs attention.", _rows())


def _rows() -> list[Row]:
    by_state = f"sum by (run, state) (ddpobs_run_state{{{RUN}}})"
    lost = (
        f"sum by (run) (ddpobs_phase_seconds_total{{{RUN}}}) "
        f"* on (run) (1 / (ddpobs_goodput_ratio{{{RUN}}} > 0) - 1) / 3600"
    )
    return [
        (
            "Runs",
            [
                rows_of(
                    "Findings",
                    f'sort_desc(ddpobs_finding_gain_ratio{{{RUN},severity=~"warning|critical"}})',
                    "Each finding with its ranks, its phase and the predicted gain; the largest gain first. "
                    "An empty table is "
                    "good. A row's link leads to the remedy.",
                    24,
                ),
                number(
                    "Findings by severity",
                    f"sum by (severity) (ddpobs_findings{{{RUN}}})",
                    "short",
                    8,
                    "Open findings of all runs. Critical ones cost a quarter of the time or more.",
                    legend="{{severity}}",
                ),
                number(
                    "States",
                    by_state,
                    "short",
                    16,
                    "running is good; hung, failed, lost and stalled are bad; a person ends a run as interrupted.",
                    legend="{{run}}: {{state}}",
                ),
            ],
        ),
        (
            "Pace",
            [
                lines(
                    "Steps a second, by run",
                    [(f"avg by (run) (rate(ddpobs_steps_total{{{RUN}}}[{OVER}]))", "{{run}}")],
                    "short",
                    "A level line is good. A drop begins a slow stretch, and a gap is a restart or a hang.",
                ),
                lines(
                    "Goodput",
                    [(f"ddpobs_goodput_ratio{{{RUN}}}", "{{run}}")],
                    "percentunit",
                    "Share of the wall time in steps that no restart repeated. 90 % is good, below 50 % is bad.",
                    bounds=(0.9, 0.5),
                ),
                bars(
                    "GPU-hours lost",
                    lost,
                    "h",
                    "Hours of all ranks outside of productive steps, from goodput and the time in steps. "
                    "Small is good.",
                    legend="{{run}}",
                ),
                bars(
                    "GPU-hours spent waiting for the last rank",
                    f"sum by (run) (ddpobs_comm_wait_seconds_total{{{RUN}}}) / 3600",
                    "h",
                    "Hours in which ranks waited for the slowest one, in the compared steps. Small is good.",
                    legend="{{run}}",
                ),
            ],
        ),
    ]
