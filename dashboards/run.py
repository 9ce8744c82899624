"""The dashboard of a run, or of several side by side: findings, pace, and a step's time by phase."""

from __future__ import annotations

from ddpobs_server.store.schema import STEP_BOUNDS_S
from grafana_foundation_sdk.builders import dashboard

from dashboards.panels import OVER, RUN, Row, lines, number, of_runs, rows_of, stacked

_MEAN_STEP = (
    f"sum by (run) (rate(ddpobs_step_duration_seconds_sum{{{RUN}}}[{OVER}])) "
    f"/ sum by (run) (rate(ddpobs_step_duration_seconds_count{{{RUN}}}[{OVER}]))"
)


def run() -> dashboard.Dashboard:
    """Return the dashboard."""
    return of_runs("ddpobs: run", "ddpobs-run", "Where every millisecond of a training step went.", _rows())


def _rows() -> list[Row]:
    return [
        (
            "At a glance",
            [
                rows_of(
                    "Findings",
                    f"sort_desc(ddpobs_finding_gain_ratio{{{RUN}}})",
                    "The most severe findings with ranks, phase and predicted gain. An empty table is good.",
                    12,
                ),
                number(
                    "Steps a second",
                    f"avg by (run) (rate(ddpobs_steps_total{{{RUN}}}[{OVER}]))",
                    "short",
                    4,
                    "Optimizer steps of one rank. More is better; compare with earlier runs of the same model.",
                ),
                number(
                    "Step time, mean",
                    _MEAN_STEP,
                    "s",
                    4,
                    "Wall time of a step, over all ranks. Less is better; compare with earlier runs of the same model.",
                ),
                number(
                    "Exposed communication",
                    f"sum by (run) (rate(ddpobs_comm_exposed_seconds_total{{{RUN}}}[{OVER}])) "
                    f"/ sum by (run) (rate(ddpobs_phase_seconds_total{{{RUN}}}[{OVER}]))",
                    "percentunit",
                    4,
                    "Share of the time in communication that backward did not hide. Below 10 % is good, above "
                    "30 % is bad.",
                    bounds=(0.1, 0.3),
                ),
            ],
        ),
        (
            "Steps",
            [
                lines(
                    "Step time: mean, and estimated quantiles",
                    [
                        (_MEAN_STEP, "{{run}}, mean"),
                        (_quantile(0.5), "{{run}}, median"),
                        (_quantile(0.95), "{{run}}, 95th percentile"),
                    ],
                    "s",
                    "Close lines are good; a 95th percentile far above the median shows jitter. The mean is "
                    "exact. A quantile "
                    "may be anywhere between two of the histogram's bounds: "
                    f"{', '.join(f'{bound:g}' for bound in STEP_BOUNDS_S)} s.",
                ),
                stacked(
                    "A step's time by phase",
                    f"sum by (run, phase) (rate(ddpobs_phase_seconds_total{{{RUN}}}[{OVER}])) "
                    f"/ on (run) group_left () sum by (run) (rate(ddpobs_steps_total{{{RUN}}}[{OVER}]))",
                    "{{run}}, {{phase}}",
                    "s",
                    "Forward and backward should dominate. Much data, exposed communication or other time can "
                    "be saved.",
                ),
            ],
        ),
        (
            "Wall time and telemetry",
            [
                stacked(
                    "Share of the run's wall time",
                    f"sum by (run, group) (ddpobs_time_share_ratio{{{RUN}}})",
                    "{{run}}, {{group}}",
                    "percentunit",
                    "Steps should be nearly all. The rest is start-up, restarts, idle time and work outside of steps.",
                ),
                lines(
                    "Goodput of the run",
                    [(f"ddpobs_goodput_ratio{{{RUN}}}", "{{run}}")],
                    "percentunit",
                    "Share of the wall time in steps that no restart repeated. 90 % is good, below 50 % is bad.",
                    bounds=(0.9, 0.5),
                ),
                number(
                    "Unused parameters",
                    f"max by (run) (ddpobs_unused_parameters{{{RUN}}})",
                    "short",
                    8,
                    "Parameters without a gradient on some rank. 0 is good, unless the model is meant to "
                    "leave some out.",
                    bounds=(1, 1000),
                ),
                number(
                    "Records dropped",
                    f"sum by (run) (ddpobs_telemetry_dropped_total{{{RUN}}})",
                    "short",
                    8,
                    "Telemetry records lost before they reached the collector. 0 is good.",
                    bounds=(1, 1000),
                ),
                number(
                    "Last step",
                    f"max by (run) (ddpobs_last_step{{{RUN}}})",
                    "short",
                    8,
                    "Number of the latest step. It should grow; if it stands still, look at the run's state.",
                ),
            ],
        ),
    ]


def _quantile(q: float) -> str:
    return f"histogram_quantile({q}, sum by (run, le) (rate(ddpobs_step_duration_seconds_bucket{{{RUN}}}[{OVER}])))"
