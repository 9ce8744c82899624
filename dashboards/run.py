"""The dashboard of a run, or of several side by side: findings, pace, and a step's time by phase."""

from __future__ import annotations

from ddpobs_server.store.schema import STEP_BOUNDS_S
from grafana_foundation_sdk.builders import dashboard, timeseries

from dashboards.panels import (
    OVER,
    RUN,
    TOP,
    Row,
    bars,
    in_phase_colors,
    lines,
    number,
    of_runs,
    over_range,
    query,
    stacked,
    top,
)
from dashboards.tables import findings

_MEAN_STEP = (
    f"sum by (run) (rate(ddpobs_step_duration_seconds_sum{{{RUN}}}[{OVER}])) "
    f"/ sum by (run) (rate(ddpobs_step_duration_seconds_count{{{RUN}}}[{OVER}]))"
)
_MOVING, _WAITING = (
    f"sum by (run) (rate(ddpobs_comm_{what}_seconds_total{{{RUN}}}[{OVER}])) "
    f"/ sum by (run) (rate(ddpobs_compared_steps_total{{{RUN}}}[{OVER}]))"
    for what in ("moving", "wait")
)
_BUCKET = "{{run}}, bucket {{bucket}}"
_EXPOSED_MOST = over_range("ddpobs_bucket_exposed_seconds_total", RUN, "run, bucket")


def run() -> dashboard.Dashboard:
    """Return the dashboard."""
    return of_runs("ddpobs: run", "ddpobs-run", "Where every millisecond of a training step went.", _rows())


def _rows() -> list[Row]:
    return [
        (
            "At a glance",
            [
                findings(24),
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
                    "Moving gradients",
                    f"({_MOVING}) / ({_MEAN_STEP})",
                    "percentunit",
                    4,
                    "Share of a step in moving data that backward did not hide, waiting left out. Below 10 % is good, "
                    "above 30 % is bad: buckets, compression or accumulation may help.",
                    bounds=(0.1, 0.3),
                ),
                number(
                    "Waiting for ranks",
                    f"({_WAITING}) / ({_MEAN_STEP})",
                    "percentunit",
                    4,
                    "Share of a step in waiting for the last rank. Near zero is good. Much of it is a slow rank, not "
                    "a slow network.",
                    bounds=(0.1, 0.25),
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
                _phases(),
            ],
        ),
        (
            f"Buckets: the {TOP} with the most exposed communication",
            [
                bars(
                    "Computation before a bucket",
                    _of_bucket("ddpobs_bucket_ready_seconds_total"),
                    "s",
                    "From the previous bucket's readiness to this one's. If it is longer than the "
                    "communication, that is hidden.",
                    legend=_BUCKET,
                ),
                bars(
                    "Bucket size",
                    top(f"max by (run, bucket) (ddpobs_bucket_bytes{{{RUN}}})", "run, bucket", _EXPOSED_MOST),
                    "bytes",
                    "Size of a bucket. Tens of megabytes use the network well; a large last bucket is exposed.",
                    legend=_BUCKET,
                ),
                lines(
                    "Communication of a bucket, per step",
                    [(_of_bucket("ddpobs_bucket_comm_seconds_total"), _BUCKET)],
                    "s",
                    "From launch to completion, waiting included, mean over ranks. If all lines rise together, the "
                    "network or a rank is slow.",
                ),
                lines(
                    "Exposed communication of a bucket, per step",
                    [(_of_bucket("ddpobs_bucket_exposed_seconds_total"), _BUCKET)],
                    "s",
                    "Near zero is good for all but the last bucket. The lines add up to the time that a faster network "
                    "could save.",
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


def _phases() -> timeseries.Panel:
    """A step's time by phase, with waiting and moving apart."""
    steps = f"/ on (run) group_left () sum by (run) (rate(ddpobs_steps_total{{{RUN}}}[{OVER}]))"
    own = f'sum by (run, phase) (rate(ddpobs_phase_seconds_total{{{RUN},phase!="exposed_comm"}}[{OVER}])) {steps}'
    exposed = f"sum by (run) (rate(ddpobs_comm_exposed_seconds_total{{{RUN}}}[{OVER}])) {steps}"
    panel = stacked(
        "A step's time by phase",
        own,
        "{{run}}, {{phase}}",
        "s",
        "Forward and backward should dominate. Much data, moving, waiting for ranks or other time can be saved. The "
        "phases of one run are in the page's colours.",
    )
    panel = panel.with_target(query(f"clamp_min({exposed} - ({_MOVING}), 0)", "{{run}}, waiting for ranks", "B"))
    return in_phase_colors(panel.with_target(query(_MOVING, "{{run}}, moving data", "C")))


def _of_bucket(metric: str) -> str:
    per_step = (
        f"sum by (run, bucket) (rate({metric}{{{RUN}}}[{OVER}])) "
        f"/ on (run) group_left () sum by (run) (rate(ddpobs_steps_total{{{RUN}}}[{OVER}]))"
    )
    return top(per_step, "run, bucket", _EXPOSED_MOST)


def _quantile(q: float) -> str:
    return f"histogram_quantile({q}, sum by (run, le) (rate(ddpobs_step_duration_seconds_bucket{{{RUN}}}[{OVER}])))"
