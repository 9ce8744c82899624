"""The dashboard of a run's gradient buckets: computation, communication and size."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dashboards.panels import OVER, RUN, Row, bars, lines, of_runs

LEGEND = "{{run}}, bucket {{bucket}}"


def buckets() -> dashboard.Dashboard:
    """Return the dashboard."""
    return of_runs("ddpobs: buckets", "ddpobs-buckets", "Which bucket's communication is not hidden.", _rows())


def _rows() -> list[Row]:
    return [
        (
            "Time",
            [
                bars(
                    "Communication by bucket",
                    _per_step("ddpobs_bucket_comm_seconds_total"),
                    "s",
                    "From launch to completion, waiting included, mean over ranks. Even bars are good; a long "
                    "first bar is the "
                    "wait for a slow rank.",
                    legend=LEGEND,
                ),
                bars(
                    "Exposed communication by bucket",
                    _per_step("ddpobs_bucket_exposed_seconds_total"),
                    "s",
                    "Communication after the last gradient. Zero for all but the last buckets is good.",
                    legend=LEGEND,
                ),
                bars(
                    "Computation before a bucket",
                    _per_step("ddpobs_bucket_ready_seconds_total"),
                    "s",
                    "From the previous bucket's readiness to this one's. If it is longer than the "
                    "communication, that is hidden.",
                    legend=LEGEND,
                ),
                bars(
                    "Bucket size",
                    f"max by (run, bucket) (ddpobs_bucket_bytes{{{RUN}}})",
                    "bytes",
                    "Size of a bucket. Tens of megabytes use the network well; a large last bucket is exposed.",
                    legend=LEGEND,
                ),
            ],
        ),
        (
            "Over time",
            [
                lines(
                    "Communication of a bucket, per step",
                    [(_per_step("ddpobs_bucket_comm_seconds_total"), LEGEND)],
                    "s",
                    "Level lines are good. If all rise together, the network or a rank is slow.",
                ),
                lines(
                    "Exposed communication of a bucket, per step",
                    [(_per_step("ddpobs_bucket_exposed_seconds_total"), LEGEND)],
                    "s",
                    "Near zero is good. The lines add up to the time that a faster network could save.",
                ),
            ],
        ),
    ]


def _per_step(metric: str) -> str:
    return (
        f"sum by (run, bucket) (rate({metric}{{{RUN}}}[{OVER}])) "
        f"/ on (run) group_left () sum by (run) (rate(ddpobs_steps_total{{{RUN}}}[{OVER}]))"
    )
