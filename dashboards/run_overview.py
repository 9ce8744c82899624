"""One run: is it slow, who is slow, and where the time goes."""

from __future__ import annotations

from ddpobs_server.store.schema import STEP_BOUNDS_S
from grafana_foundation_sdk.builders import dashboard, table

from dashboards.panels import OVER, SOURCE, Row, bars, board, lines, number, query, stacked, variable

OF_RUN = 'run=~"$run"'
OF_RANK = f'{OF_RUN},rank=~"$rank"'
_MEAN_STEP = (
    f"sum by (run) (rate(ddpobs_step_duration_seconds_sum{{{OF_RUN}}}[{OVER}])) "
    f"/ sum by (run) (rate(ddpobs_step_duration_seconds_count{{{OF_RUN}}}[{OVER}]))"
)


def run_overview() -> dashboard.Dashboard:
    """Built from rows."""
    return board(
        "ddpobs: run overview",
        "ddpobs-run-overview",
        "Where every millisecond of a training step went, by rank, phase and bucket.",
        [
            variable("run", "label_values(ddpobs_run_info, run)", many=False),
            variable("rank", 'label_values(ddpobs_steps_total{run=~"$run"}, rank)', many=True),
        ],
        _rows(),
    )


def _rows() -> list[Row]:
    return [
        (
            "At a glance",
            [
                _findings(),
                number("Steps a second", f"avg by (run) (rate(ddpobs_steps_total{{{OF_RUN}}}[{OVER}]))", "short", 4),
                number("Step time, mean", _MEAN_STEP, "s", 4),
                number(
                    "Exposed communication",
                    _share("ddpobs_comm_exposed_seconds_total", "ddpobs_phase_seconds_total"),
                    "percentunit",
                    4,
                ),
            ],
        ),
        (
            "Steps",
            [
                lines(
                    "Step time: mean, and quantiles as a histogram estimates them",
                    [(_MEAN_STEP, "mean"), (_quantile(0.5), "median"), (_quantile(0.95), "95th percentile")],
                    "s",
                ).description(
                    "The mean is exact. A quantile may be anywhere between two of the histogram's bounds: "
                    f"{', '.join(f'{bound:g}' for bound in STEP_BOUNDS_S)} s."
                ),
                stacked(
                    "Where a step's time goes",
                    f"sum by (phase) (rate(ddpobs_phase_seconds_total{{{OF_RANK}}}[{OVER}])) "
                    f"/ scalar(sum(rate(ddpobs_steps_total{{{OF_RANK}}}[{OVER}])))",
                    "{{phase}}",
                    "s",
                ),
            ],
        ),
        (
            "Ranks",
            [
                lines(
                    "Delay that a rank caused, per step",
                    [(_per_compared_step("ddpobs_rank_delay_seconds_total"), "rank {{rank}}")],
                    "s",
                ),
                lines(
                    "Waiting for the last rank, per step",
                    [(_per_compared_step("ddpobs_comm_wait_seconds_total"), "rank {{rank}}")],
                    "s",
                ),
                stacked(
                    "Share of steps in which a rank was late",
                    f"sum by (rank, phase) (rate(ddpobs_straggler_steps_total{{{OF_RANK}}}[{OVER}])) "
                    "/ on (rank) group_left () "
                    f"sum by (rank) (rate(ddpobs_compared_steps_total{{{OF_RANK}}}[{OVER}])) > 0 "
                    f"or sum by (rank, phase) (ddpobs_straggler_steps_total{{{OF_RANK}}}) * 0",
                    "rank {{rank}}, {{phase}}",
                    "percentunit",
                ),
                lines(
                    "Seconds since a rank's last step",
                    [(f"time() - ddpobs_last_step_timestamp_seconds{{{OF_RANK}}}", "rank {{rank}}")],
                    "s",
                ),
            ],
        ),
        (
            "Communication",
            [
                lines(
                    "Communication, per step",
                    [
                        (_per_step("ddpobs_comm_seconds_total"), "rank {{rank}}"),
                        (_per_step("ddpobs_comm_exposed_seconds_total"), "rank {{rank}}, exposed"),
                    ],
                    "s",
                ),
                lines(
                    "Gradient bytes a second",
                    [(f"rate(ddpobs_allreduce_bytes_total{{{OF_RANK}}}[{OVER}])", "rank {{rank}}")],
                    "Bps",
                ),
                bars(
                    "Communication by bucket",
                    f"sum by (bucket) (rate(ddpobs_bucket_comm_seconds_total{{{OF_RUN}}}[{OVER}])) "
                    f"/ scalar(sum(rate(ddpobs_steps_total{{{OF_RUN}}}[{OVER}])))",
                    "s",
                ),
                bars(
                    "Exposed communication by bucket",
                    f"sum by (bucket) (rate(ddpobs_bucket_exposed_seconds_total{{{OF_RUN}}}[{OVER}])) "
                    f"/ scalar(sum(rate(ddpobs_steps_total{{{OF_RUN}}}[{OVER}])))",
                    "s",
                ),
                bars(
                    "Gradients computed by bucket",
                    f"sum by (bucket) (rate(ddpobs_bucket_ready_seconds_total{{{OF_RUN}}}[{OVER}])) "
                    f"/ scalar(sum(rate(ddpobs_steps_total{{{OF_RUN}}}[{OVER}])))",
                    "s",
                ),
                bars("Bucket size", f"max by (bucket) (ddpobs_bucket_bytes{{{OF_RUN}}})", "bytes"),
            ],
        ),
        (
            "Telemetry",
            [
                number("Unused parameters", f"max by (run) (ddpobs_unused_parameters{{{OF_RUN}}})", "short", 8),
                number("Records dropped", f"sum by (run) (ddpobs_telemetry_dropped_total{{{OF_RUN}}})", "short", 8),
                number("Last step", f"max by (run) (ddpobs_last_step{{{OF_RUN}}})", "short", 8),
            ],
        ),
    ]


def _quantile(q: float) -> str:
    return f"histogram_quantile({q}, sum by (le) (rate(ddpobs_step_duration_seconds_bucket{{{OF_RUN}}}[{OVER}])))"


def _share(part: str, whole: str) -> str:
    return f"sum(rate({part}{{{OF_RANK}}}[{OVER}])) / sum(rate({whole}{{{OF_RANK}}}[{OVER}]))"


def _per_step(metric: str, steps: str = "ddpobs_steps_total") -> str:
    return f"rate({metric}{{{OF_RANK}}}[{OVER}]) / rate({steps}{{{OF_RANK}}}[{OVER}])"


def _per_compared_step(metric: str) -> str:
    return _per_step(metric, "ddpobs_compared_steps_total")


def _findings() -> table.Panel:
    asked = query(f"ddpobs_findings{{{OF_RUN}}} > 0", "").instant().format("table")  # type: ignore[arg-type]
    return (
        table.Panel()
        .title("Findings")
        .description("What the collector found; its page says more.")
        .datasource(SOURCE)
        .height(6)
        .span(12)
        .with_target(asked)
    )
