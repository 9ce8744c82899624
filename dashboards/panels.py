"""Panels as all of our dashboards have them."""

from __future__ import annotations

from grafana_foundation_sdk.builders import bargauge, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders.common import ReduceDataOptions, StackingConfig
from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
OVER = "5m"
"""What rates look back on: at least two scrapes, at Prometheus's own interval of a minute too, even where one fails."""
Row = tuple[str, list[stat.Panel | timeseries.Panel | bargauge.Panel | table.Panel]]
"""A title and the panels under it."""


def board(
    title: str, uid: str, description: str, variables: list[dashboard.QueryVariable], rows: list[Row]
) -> dashboard.Dashboard:
    """A dashboard of rows, over the data source and the variables that its reader chooses."""
    built = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["ddpobs"])
        .refresh("10s")
        .time("now-30m", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for chosen in variables:
        built = built.with_variable(chosen)
    for name, panels in rows:
        built = built.with_row(dashboard.Row(name))
        for panel in panels:
            built = built.with_panel(panel)
    return built


def variable(name: str, values: str, many: bool) -> dashboard.QueryVariable:
    """A choice of one or of many of a label's values."""
    chosen = dashboard.QueryVariable(name).label(name.capitalize()).datasource(SOURCE).query(values)
    return chosen.include_all(many).multi(many).refresh(2)  # type: ignore[arg-type]


def query(expr: str, legend: str, ref: str = "A") -> prometheus.Dataquery:
    """A question to Prometheus, and how its series are called."""
    return prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(ref).datasource(SOURCE)


def number(title: str, expr: str, unit: str, span: int, legend: str = "{{run}}") -> stat.Panel:
    """The last value, large."""
    last = ReduceDataOptions().calcs(["lastNotNull"])
    return (
        stat.Panel()
        .title(title)
        .datasource(SOURCE)
        .unit(unit)
        .height(6)
        .span(span)
        .reduce_options(last)
        .with_target(query(expr, legend))
    )


def lines(title: str, queries: list[tuple[str, str]], unit: str) -> timeseries.Panel:
    """Lines over time, from zero: expressions and how their series are called."""
    panel = timeseries.Panel().title(title).datasource(SOURCE).unit(unit).height(8).span(12).min(0)
    for index, (expr, legend) in enumerate(queries):
        panel = panel.with_target(query(expr, legend, chr(ord("A") + index)))
    return panel


def stacked(title: str, expr: str, legend: str, unit: str) -> timeseries.Panel:
    """Areas that add up."""
    return lines(title, [(expr, legend)], unit).fill_opacity(70).stacking(StackingConfig().mode(StackingMode.NORMAL))


def bars(title: str, expr: str, unit: str) -> bargauge.Panel:
    """The last values, a bar each."""
    last = ReduceDataOptions().calcs(["lastNotNull"])
    return (
        bargauge.Panel()
        .title(title)
        .datasource(SOURCE)
        .unit(unit)
        .height(8)
        .span(6)
        .reduce_options(last)
        .with_target(query(expr, "bucket {{bucket}}"))
    )
