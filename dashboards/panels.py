"""Panels and variables that the dashboards share."""

from __future__ import annotations

from grafana_foundation_sdk.builders import bargauge, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders.common import ReduceDataOptions, StackingConfig
from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
OVER = "5m"
"""Range of every rate: two scrapes, even at Prometheus's default interval of a minute and with a failed scrape."""
Row = tuple[str, list[stat.Panel | timeseries.Panel | bargauge.Panel | table.Panel]]
"""A title and the panels under it."""


def board(
    title: str, uid: str, description: str, variables: list[dashboard.QueryVariable], rows: list[Row]
) -> dashboard.Dashboard:
    """Return a dashboard of rows, with a choice of data source and of the variables' values."""
    result = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["ddpobs"])
        .refresh("10s")
        .time("now-30m", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for choice in variables:
        result = result.with_variable(choice)
    for name, panels in rows:
        result = result.with_row(dashboard.Row(name))
        for panel in panels:
            result = result.with_panel(panel)
    return result


def variable(name: str, values: str, many: bool) -> dashboard.QueryVariable:
    """Return a choice of a label's values, of several values if `many`."""
    choice = dashboard.QueryVariable(name).label(name.capitalize()).datasource(SOURCE).query(values)
    return choice.include_all(many).multi(many).refresh(2)  # type: ignore[arg-type]


def query(expr: str, legend: str, ref: str = "A") -> prometheus.Dataquery:
    """Return a query to Prometheus with the legend of its series."""
    return prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(ref).datasource(SOURCE)


def number(title: str, expr: str, unit: str, span: int, legend: str = "{{run}}") -> stat.Panel:
    """Return a panel with the last value as a large number."""
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
    """Return lines over time, from zero. `queries` holds expressions and the legends of their series."""
    panel = timeseries.Panel().title(title).datasource(SOURCE).unit(unit).height(8).span(12).min(0)
    for index, (expr, legend) in enumerate(queries):
        panel = panel.with_target(query(expr, legend, chr(ord("A") + index)))
    return panel


def stacked(title: str, expr: str, legend: str, unit: str) -> timeseries.Panel:
    """Return stacked areas over time."""
    return lines(title, [(expr, legend)], unit).fill_opacity(70).stacking(StackingConfig().mode(StackingMode.NORMAL))


def bars(title: str, expr: str, unit: str) -> bargauge.Panel:
    """Return a bar for the last value of each bucket."""
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
