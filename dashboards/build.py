"""Builds the Grafana dashboards, committed under `dashboards/grafana/`: run `python dashboards/build.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import bargauge, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders.common import ReduceDataOptions, StackingConfig
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef

FOLDER = Path(__file__).parent / "grafana"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
OF_RUN = 'run=~"$run"'
OF_RANK = f'{OF_RUN},rank=~"$rank"'


def run_overview() -> dashboard.Dashboard:
    """One run: is it slow, who is slow, and where the time goes."""
    built = (
        dashboard.Dashboard("ddpobs: run overview")
        .uid("ddpobs-run-overview")
        .description("Where every millisecond of a training step went, by rank, phase and bucket.")
        .tags(["ddpobs"])
        .refresh("10s")
        .time("now-30m", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_variable("run", "label_values(ddpobs_run_info, run)"))
        .with_variable(_variable("rank", 'label_values(ddpobs_steps_total{run=~"$run"}, rank)'))
    )
    for row, panels in _rows():
        built = built.with_row(dashboard.Row(row))
        for panel in panels:
            built = built.with_panel(panel)
    return built


def _rows() -> list[tuple[str, list[Any]]]:
    return [
        (
            "At a glance",
            [
                _findings(),
                _stat("Steps a second", f"sum by (run) (rate(ddpobs_steps_total{{{OF_RUN}}}[1m]))", "short", 4),
                _stat("Step time, median", _quantile(0.5), "s", 4),
                _stat(
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
                _lines("Step time", [(_quantile(0.5), "median"), (_quantile(0.95), "95th percentile")], "s"),
                _stacked(
                    "Where a step's time goes",
                    f"sum by (phase) (rate(ddpobs_phase_seconds_total{{{OF_RANK}}}[1m])) "
                    f"/ scalar(sum(rate(ddpobs_steps_total{{{OF_RANK}}}[1m])))",
                    "{{phase}}",
                    "s",
                ),
            ],
        ),
        (
            "Ranks",
            [
                _lines(
                    "Delay that a rank caused, per step",
                    [(_per_step("ddpobs_rank_delay_seconds_total", OF_RANK), "rank {{rank}}")],
                    "s",
                ),
                _lines(
                    "Waiting for the last rank, per step",
                    [(_per_step("ddpobs_comm_wait_seconds_total", OF_RANK), "rank {{rank}}")],
                    "s",
                ),
                _stacked(
                    "Steps in which a rank was late, a second",
                    f"sum by (rank, phase) (rate(ddpobs_straggler_steps_total{{{OF_RANK}}}[1m])) > 0 "
                    f"or sum by (rank, phase) (ddpobs_straggler_steps_total{{{OF_RANK}}}) * 0",
                    "rank {{rank}}, {{phase}}",
                    "short",
                ),
                _lines(
                    "Seconds since a rank's last step",
                    [(f"time() - ddpobs_last_step_timestamp_seconds{{{OF_RANK}}}", "rank {{rank}}")],
                    "s",
                ),
            ],
        ),
        (
            "Communication",
            [
                _lines(
                    "Communication, per step",
                    [
                        (_per_step("ddpobs_comm_seconds_total", OF_RANK), "rank {{rank}}"),
                        (_per_step("ddpobs_comm_exposed_seconds_total", OF_RANK), "rank {{rank}}, exposed"),
                    ],
                    "s",
                ),
                _lines(
                    "Gradient bytes a second",
                    [(f"rate(ddpobs_allreduce_bytes_total{{{OF_RANK}}}[1m])", "rank {{rank}}")],
                    "Bps",
                ),
                _bars(
                    "Communication by bucket",
                    f"sum by (bucket) (rate(ddpobs_bucket_comm_seconds_total{{{OF_RUN}}}[1m])) "
                    f"/ scalar(sum(rate(ddpobs_steps_total{{{OF_RUN}}}[1m])))",
                    "s",
                ),
                _bars(
                    "Exposed communication by bucket",
                    f"sum by (bucket) (rate(ddpobs_bucket_exposed_seconds_total{{{OF_RUN}}}[1m])) "
                    f"/ scalar(sum(rate(ddpobs_steps_total{{{OF_RUN}}}[1m])))",
                    "s",
                ),
                _bars(
                    "Gradients computed by bucket",
                    f"sum by (bucket) (rate(ddpobs_bucket_ready_seconds_total{{{OF_RUN}}}[1m])) "
                    f"/ scalar(sum(rate(ddpobs_steps_total{{{OF_RUN}}}[1m])))",
                    "s",
                ),
                _bars("Bucket size", f"max by (bucket) (ddpobs_bucket_bytes{{{OF_RUN}}})", "bytes"),
            ],
        ),
        (
            "Telemetry",
            [
                _stat("Unused parameters", f"max by (run) (ddpobs_unused_parameters{{{OF_RUN}}})", "short", 8),
                _stat("Records dropped", f"sum by (run) (ddpobs_telemetry_dropped_total{{{OF_RUN}}})", "short", 8),
                _stat("Last step", f"max by (run) (ddpobs_last_step{{{OF_RUN}}})", "short", 8),
            ],
        ),
    ]


def _variable(name: str, query: str) -> dashboard.QueryVariable:
    variable = dashboard.QueryVariable(name).label(name.capitalize()).datasource(SOURCE).query(query)
    return variable.include_all(name == "rank").multi(name == "rank").refresh(2)  # type: ignore[arg-type]


def _quantile(q: float) -> str:
    return f"histogram_quantile({q}, sum by (le) (rate(ddpobs_step_duration_seconds_bucket{{{OF_RUN}}}[1m])))"


def _share(part: str, whole: str) -> str:
    return f"sum(rate({part}{{{OF_RANK}}}[1m])) / sum(rate({whole}{{{OF_RANK}}}[1m]))"


def _per_step(metric: str, labels: str) -> str:
    return f"rate({metric}{{{labels}}}[1m]) / rate(ddpobs_steps_total{{{labels}}}[1m])"


def _query(expr: str, legend: str, ref: str = "A") -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(ref).datasource(SOURCE)


def _findings() -> table.Panel:
    query = _query(f"ddpobs_findings{{{OF_RUN}}} > 0", "").instant().format("table")  # type: ignore[arg-type]
    return (
        table.Panel()
        .title("Findings")
        .description("What the collector found; its page says more.")
        .datasource(SOURCE)
        .height(6)
        .span(12)
        .with_target(query)
    )


def _stat(title: str, expr: str, unit: str, span: int) -> stat.Panel:
    last = ReduceDataOptions().calcs(["lastNotNull"])
    return (
        stat.Panel()
        .title(title)
        .datasource(SOURCE)
        .unit(unit)
        .height(6)
        .span(span)
        .reduce_options(last)
        .with_target(_query(expr, "{{run}}"))
    )


def _lines(title: str, queries: list[tuple[str, str]], unit: str) -> timeseries.Panel:
    panel = timeseries.Panel().title(title).datasource(SOURCE).unit(unit).height(8).span(12).min(0)
    for index, (expr, legend) in enumerate(queries):
        panel = panel.with_target(_query(expr, legend, chr(ord("A") + index)))
    return panel


def _stacked(title: str, expr: str, legend: str, unit: str) -> timeseries.Panel:
    return _lines(title, [(expr, legend)], unit).fill_opacity(70).stacking(StackingConfig().mode(StackingMode.NORMAL))


def _bars(title: str, expr: str, unit: str) -> bargauge.Panel:
    last = ReduceDataOptions().calcs(["lastNotNull"])
    return (
        bargauge.Panel()
        .title(title)
        .datasource(SOURCE)
        .unit(unit)
        .height(8)
        .span(6)
        .reduce_options(last)
        .with_target(_query(expr, "bucket {{bucket}}"))
    )


def built() -> dict[str, str]:
    """File name -> JSON of every dashboard."""
    return {"run-overview.json": JSONEncoder(sort_keys=True, indent=2).encode(run_overview().build()) + "\n"}


def main() -> None:
    """Write them all."""
    for name, text in built().items():
        json.loads(text)
        (FOLDER / name).write_text(text)
        print(f"dashboards/grafana/{name}")


if __name__ == "__main__":
    main()
