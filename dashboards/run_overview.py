"""A run's dashboard: its findings, its slow ranks, and the time by phase and bucket."""

from __future__ import annotations

from ddpobs_server.store.schema import STEP_BOUNDS_S
from grafana_foundation_sdk.builders import dashboard, table

from dashboards.panels import OVER, SOURCE, Row, bars, board, lines, number, query, stacked, variable

RUN = 'run=~"$run"'
RANK = f'{RUN},rank=~"$rank"'
_MEAN_STEP = (
    f"sum by (run) (rate(ddpobs_step_duration_seconds_sum{{{RUN}}}[{OVER}])) "
    f"/ sum by (run) (rate(ddpobs_step_duration_seconds_count{{{RUN}}}[{OVER}]))"
)


def run_overview() -> dashboard.Dashboard:
    """Return the dashboard."""
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
                number("Steps a second", f"avg by (run) (rate(ddpobs_steps_total{{{RUN}}}[{OVER}]))", "short", 4),
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
                    "Step time: mean, and estimated quantiles",
                    [(_MEAN_STEP, "mean"), (_quantile(0.5), "median"), (_quantile(0.95), "95th percentile")],
                    "s",
                ).description(
                    "The mean is exact. A quantile may be anywhere between two of the histogram's bounds: "
                    f"{', '.join(f'{bound:g}' for bound in STEP_BOUNDS_S)} s."
                ),
                stacked(
                    "A step's time by phase",
                    f"sum by (phase) (rate(ddpobs_phase_seconds_total{{{RANK}}}[{OVER}])) "
                    f"/ scalar(sum(rate(ddpobs_steps_total{{{RANK}}}[{OVER}])))",
                    "{{phase}}",
                    "s",
                ),
            ],
        ),
        (
            "Ranks",
            [
                lines(
                    "Delay caused by a rank, per step",
                    [(_per_compared_step("ddpobs_rank_delay_seconds_total"), "rank {{rank}}")],
                    "s",
                ),
                lines(
                    "Waiting for the last rank, per step",
                    [(_per_compared_step("ddpobs_comm_wait_seconds_total"), "rank {{rank}}")],
                    "s",
                ),
                stacked(
                    "Share of steps in which a rank was last and late",
                    f"sum by (rank, phase) (rate(ddpobs_straggler_steps_total{{{RANK}}}[{OVER}])) "
                    "/ on (rank) group_left () "
                    f"sum by (rank) (rate(ddpobs_compared_steps_total{{{RANK}}}[{OVER}])) > 0 "
                    f"or sum by (rank, phase) (ddpobs_straggler_steps_total{{{RANK}}}) * 0",
                    "rank {{rank}}, {{phase}}",
                    "percentunit",
                ),
                lines(
                    "Seconds since a rank's last step",
                    [(f"time() - ddpobs_last_step_timestamp_seconds{{{RANK}}}", "rank {{rank}}")],
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
                    [(f"rate(ddpobs_allreduce_bytes_total{{{RANK}}}[{OVER}])", "rank {{rank}}")],
                    "Bps",
                ),
                bars(
                    "Communication by bucket",
                    f"sum by (bucket) (rate(ddpobs_bucket_comm_seconds_total{{{RUN}}}[{OVER}])) "
                    f"/ scalar(sum(rate(ddpobs_steps_total{{{RUN}}}[{OVER}])))",
                    "s",
                ),
                bars(
                    "Exposed communication by bucket",
                    f"sum by (bucket) (rate(ddpobs_bucket_exposed_seconds_total{{{RUN}}}[{OVER}])) "
                    f"/ scalar(sum(rate(ddpobs_steps_total{{{RUN}}}[{OVER}])))",
                    "s",
                ),
                bars(
                    "Computation of gradients by bucket",
                    f"sum by (bucket) (rate(ddpobs_bucket_ready_seconds_total{{{RUN}}}[{OVER}])) "
                    f"/ scalar(sum(rate(ddpobs_steps_total{{{RUN}}}[{OVER}])))",
                    "s",
                ),
                bars("Bucket size", f"max by (bucket) (ddpobs_bucket_bytes{{{RUN}}})", "bytes"),
            ],
        ),
        (
            "Telemetry",
            [
                number("Unused parameters", f"max by (run) (ddpobs_unused_parameters{{{RUN}}})", "short", 8),
                number("Records dropped", f"sum by (run) (ddpobs_telemetry_dropped_total{{{RUN}}})", "short", 8),
                number("Last step", f"max by (run) (ddpobs_last_step{{{RUN}}})", "short", 8),
            ],
        ),
    ]


def _quantile(q: float) -> str:
    return f"histogram_quantile({q}, sum by (le) (rate(ddpobs_step_duration_seconds_bucket{{{RUN}}}[{OVER}])))"


def _share(part: str, whole: str) -> str:
    return f"sum(rate({part}{{{RANK}}}[{OVER}])) / sum(rate({whole}{{{RANK}}}[{OVER}]))"


def _per_step(metric: str, steps: str = "ddpobs_steps_total") -> str:
    return f"rate({metric}{{{RANK}}}[{OVER}]) / rate({steps}{{{RANK}}}[{OVER}])"


def _per_compared_step(metric: str) -> str:
    return _per_step(metric, "ddpobs_compared_steps_total")


def _findings() -> table.Panel:
    findings = query(f"ddpobs_findings{{{RUN}}} > 0", "").instant().format("table")  # type: ignore[arg-type]
    return (
        table.Panel()
        .title("Findings")
        .description("The collector's findings. The run's page explains each of them.")
        .datasource(SOURCE)
        .height(6)
        .span(12)
        .with_target(findings)
    )
