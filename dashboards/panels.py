"""Panels, variables, links and annotations that the dashboards share.

A panel has at most `TOP` lines, however many ranks, buckets or runs there are: `top` selects them once for the whole
time range.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddpobs_server.figures.theme import PART_COLORS, PART_TITLES
from grafana_foundation_sdk.builders import (
    barchart,
    bargauge,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    statushistory,
    table,
    timeseries,
)
from grafana_foundation_sdk.builders.common import GraphThresholdsStyleConfig, ReduceDataOptions, StackingConfig
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.common import GraphThresholdsStyleMode, StackingMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DynamicConfigValue,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
    VariableHide,
    VariableRefresh,
)

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
OVER = "$__rate_interval"
"""Range of every rate: four scrapes of the data source's interval, so that a young run shows its true rate."""
RUN = 'run=~"$run"'
RANK = f'{RUN},rank=~"$rank"'
TOP = 12
"""Maximum number of lines of a panel."""
COLORS = {PART_TITLES[part]: color for part, color in PART_COLORS.items()}
"""Colour of each part of a step by its title, as on the page."""
SEVERITIES = {"critical": "red", "warning": "orange", "info": "blue"}
Panel = (
    stat.Panel
    | timeseries.Panel
    | bargauge.Panel
    | barchart.Panel
    | table.Panel
    | statushistory.Panel
    | statetimeline.Panel
)
Row = tuple[str, list[Panel]]
"""A title and the panels under it."""


def board(
    title: str, uid: str, description: str, variables: list[dashboard.QueryVariable], rows: list[Row]
) -> dashboard.Dashboard:
    """Return a dashboard of rows with variables and links to the other dashboards."""
    others = dashboard.DashboardLink("ddpobs").type(DashboardLinkType.DASHBOARDS).tags(["ddpobs"])
    result = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["ddpobs"])
        .readonly()
        .refresh("10s")
        .time("now-30m", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(others.include_vars(True).keep_time(True))
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for choice in variables:
        result = result.with_variable(choice)
    for name, panels in rows:
        result = result.with_row(dashboard.Row(name))
        for panel in panels:
            result = result.with_panel(panel)
    return result


def of_runs(
    title: str, uid: str, description: str, rows: list[Row], *, every: bool = False, ranks: bool = False
) -> dashboard.Dashboard:
    """Return a dashboard with a choice of runs, and annotations of what happened to them.

    Args:
        title: Title of the dashboard.
        uid: Its identifier in addresses.
        description: What it answers.
        rows: Its panels.
        every: Whether all runs are chosen at first, instead of one.
        ranks: Whether ranks are chosen too.
    """
    variables = [variable("run", "label_values(ddpobs_run_info, run)", every=every), _page_address()]
    if ranks:
        variables.insert(1, variable("rank", 'label_values(ddpobs_steps_total{run=~"$run"}, rank)'))
    result = board(title, uid, description, variables, rows)
    for name, expr, color, text in _ANNOTATIONS:
        result = result.annotation(_annotation(name, expr, color, text))
    return result


_ANNOTATIONS = [
    ("Starts and attempts", f"ddpobs_run_info{{{RUN}}}", "green", "{{run}}: attempt {{attempt}} began"),
    ("Ends", f'ddpobs_run_state{{{RUN},state=~"finished|interrupted|failed|lost|hung"}}', "red", "{{run}}: {{state}}"),
    (
        "Findings",
        f'max by (run, code, ranks, phase) (ddpobs_finding_gain_ratio{{{RUN},severity=~"warning|critical"}} * 0 + 1)',
        "orange",
        "{{run}}: {{code}} {{ranks}} {{phase}}",
    ),
]
"""Name, series, color and text. A series is annotated at its first sample alone."""


class _PrometheusAnnotation(models.AnnotationQuery):
    """An annotation with the texts that Grafana's Prometheus source fills in; the SDK does not have them."""

    texts: Mapping[str, str] = {}

    def to_json(self) -> dict[str, object]:
        return super().to_json() | dict(self.texts)


class _Annotation(dashboard.AnnotationQuery):
    def __init__(self, title: str, text: str) -> None:
        super().__init__()
        self._internal = _PrometheusAnnotation(name=title, enable=True, datasource=SOURCE)
        self._internal.texts = {"titleFormat": title, "textFormat": text, "tagKeys": "run"}


def _annotation(name: str, series: str, color: str, text: str) -> dashboard.AnnotationQuery:
    first = f"{series} unless {series.replace('}', '} offset $__interval', 1)}"
    return _Annotation(name, text).icon_color(color).expr(first)


def variable(name: str, values: str, *, every: bool = True) -> dashboard.QueryVariable:
    """Return a choice of several of a label's values; the first one is chosen at first, or all of them."""
    choice = dashboard.QueryVariable(name).label(name.capitalize()).datasource(SOURCE).query(values).multi(True)
    choice = choice.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).include_all(every)
    return choice.all_value(".+") if every else choice


def _page_address() -> dashboard.QueryVariable:
    """Return the hidden address of the collector's page, `DDPOBS_SERVER_PUBLIC_URL`."""
    values = 'label_values(ddpobs_server_info{public_url!=""}, public_url)'
    address = dashboard.QueryVariable("page").label("Page").datasource(SOURCE).query(values)
    return address.hide(VariableHide.HIDE_VARIABLE).refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)


def links_of_run() -> list[dashboard.DashboardLink]:
    """Return links from a run's value to its page and to the dashboards of the run and its ranks."""
    of_run = "var-run=${__field.labels.run}&var-datasource=${datasource}&${__url_time_range}"
    return [
        _link("The run's page", "${page}/runs/${__field.labels.run}"),
        _link("The run", f"/d/ddpobs-run?{of_run}"),
        _link("Its ranks", f"/d/ddpobs-ranks?{of_run}"),
    ]


def _link(title: str, url: str) -> dashboard.DashboardLink:
    return dashboard.DashboardLink(title).type(DashboardLinkType.LINK).url(url)


def query(expr: str, legend: str, ref: str = "A") -> prometheus.Dataquery:
    """Return a query to Prometheus with the legend of its series."""
    return prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(ref).datasource(SOURCE)


def top(expr: str, by: str, ranking: str, count: int = TOP) -> str:
    """Return the series of an expression that have the highest ranking at the end of the time range.

    `topk` alone selects anew at each point in time, so that a panel may have any number of lines.

    Args:
        expr: Series with at least the labels `by`.
        by: Labels that name a line, such as `run, rank`.
        ranking: Series of these labels alone, evaluated at the range's end by `@ end()`.
        count: Number of lines.
    """
    return f"({expr}) and on ({by}) topk({count}, {ranking})"


def over_range(metric: str, selector: str, by: str) -> str:
    """Return a counter's mean rate in the time range, at its end, by labels: a ranking for `top`."""
    return f"sum by ({by}) (rate({metric}{{{selector}}}[$__range] @ end()))"


def limits(warning: float, critical: float) -> dashboard.ThresholdsConfig:
    """Return thresholds of values that should be small, or large if `warning` is above `critical`."""
    colors = [("green", None), ("orange", warning), ("red", critical)]
    if warning > critical:
        colors = [("red", None), ("orange", critical), ("green", warning)]
    steps = [Threshold(value=value, color=color) for color, value in colors]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def number(
    title: str,
    expr: str,
    unit: str,
    span: int,
    description: str,
    *,
    legend: str = "{{run}}",
    bounds: tuple[float, float] | None = None,
) -> stat.Panel:
    """Return a panel with the last value as a large number; `bounds` are those of `limits`."""
    last = ReduceDataOptions().calcs(["lastNotNull"])
    panel = stat.Panel().title(title).description(description).datasource(SOURCE).unit(unit).height(6).span(span)
    panel = panel.reduce_options(last).with_target(query(expr, legend))
    if "{{run}}" in legend:
        panel = panel.data_links([*links_of_run()])
    return panel if bounds is None else panel.thresholds(limits(*bounds))


def lines(
    title: str,
    queries: list[tuple[str, str]],
    unit: str,
    description: str,
    *,
    bounds: tuple[float, float] | None = None,
) -> timeseries.Panel:
    """Return lines over time, from zero. `queries` holds expressions and the legends of their series."""
    panel = timeseries.Panel().title(title).description(description).datasource(SOURCE).unit(unit)
    panel = panel.height(8).span(12).min(0)
    for index, (expr, legend) in enumerate(queries):
        panel = panel.with_target(query(expr, legend, chr(ord("A") + index)))
    if any("{{run}}" in legend for _, legend in queries):
        panel = panel.data_links([*links_of_run()])
    if bounds is None:
        return panel
    dashed = GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED)
    return panel.thresholds(limits(*bounds)).thresholds_style(dashed)


def stacked(title: str, expr: str, legend: str, unit: str, description: str) -> timeseries.Panel:
    """Return stacked areas over time."""
    panel = lines(title, [(expr, legend)], unit, description)
    return panel.fill_opacity(70).stacking(StackingConfig().mode(StackingMode.NORMAL))


def bars(title: str, expr: str, unit: str, description: str, legend: str = "bucket {{bucket}}") -> bargauge.Panel:
    """Return a bar for the last value of each series."""
    last = ReduceDataOptions().calcs(["lastNotNull"])
    panel = bargauge.Panel().title(title).description(description).datasource(SOURCE).unit(unit).height(8).span(12)
    return panel.reduce_options(last).with_target(query(expr, legend))


def heat(
    title: str, expr: str, legend: str, unit: str, description: str, *, bounds: tuple[float, float]
) -> statushistory.Panel:
    """Return a row of colored cells for each series over time."""
    panel = (
        statushistory.Panel().title(title).description(description).datasource(SOURCE).unit(unit).height(10).span(24)
    )
    return panel.with_target(query(expr, legend)).thresholds(limits(*bounds)).data_links([*links_of_run()])


def states(title: str, expr: str, legend: str, colors: Mapping[str, str], description: str) -> statetimeline.Panel:
    """Return a row of each run's states over time; the expression's values are the positions of `colors`, from 1."""
    texts = {str(n): ValueMappingResult(text=state, color=colors[state]) for n, state in enumerate(colors, 1)}
    mapping = ValueMap(options=texts)
    panel = statetimeline.Panel().title(title).description(description).datasource(SOURCE).unit("short")
    panel = panel.height(8).span(24).with_target(query(expr, legend)).mappings([mapping]).merge_values(True)
    return panel.data_links([*links_of_run()])


def property_of(key: str, value: object) -> DynamicConfigValue:
    """Return a property of some of a panel's fields."""
    return DynamicConfigValue(key, value)


def in_phase_colors(panel: timeseries.Panel) -> timeseries.Panel:
    """Return the panel with each series whose name ends with a phase in that phase's colour."""
    for phase, color in COLORS.items():
        panel = panel.override_by_regexp(f"/{phase}$/", [color_of(color)])
    return panel


def color_of(color: str) -> DynamicConfigValue:
    """Return a fixed colour as a property."""
    return property_of("color", {"mode": "fixed", "fixedColor": color})
