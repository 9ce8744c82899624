"""Tables of the dashboards: findings, and the phases of ranks."""

from __future__ import annotations

from ddpobs_server.figures.theme import PART_COLORS, PART_TITLES
from grafana_foundation_sdk.builders import barchart, table
from grafana_foundation_sdk.builders.common import VizLegendOptions
from grafana_foundation_sdk.models.common import StackingMode, VisibilityMode
from grafana_foundation_sdk.models.dashboard import DataTransformerConfig

from dashboards.panels import RUN, SEVERITIES, SOURCE, color_of, property_of, query
from ddpobs.shared.words import STATED_ELSEWHERE

_COLUMNS = {
    "severity": "Severity",
    "run": "Run",
    "title": "Finding",
    "Value": "Gain",
    "ranks": "Ranks",
    "phase": "Phase",
}
_HIDDEN = ("Time", "order", "code")


def findings(span: int) -> table.Panel:
    """Return the findings of the chosen runs, the most severe first, then by gain."""
    shown = f'{RUN},code!~"{"|".join(STATED_ELSEWHERE)}"'
    rows = f"max by (run, code, severity, title, ranks, phase) (ddpobs_finding_gain_ratio{{{shown}}})"
    for order, severity in enumerate(SEVERITIES, 1):
        rows = f'label_replace({rows}, "order", "{order}", "severity", "{severity}")'
    panel = table.Panel().title("Findings").datasource(SOURCE).unit("percentunit").height(8).span(span)
    panel = panel.description("Most severe first, then by gain. An empty table is good. A finding links to its remedy.")
    panel = panel.with_target(query(f"sort_desc({rows})", "").instant().format("table"))  # type: ignore[arg-type]
    panel = panel.with_transformation(_transformation("sortBy", sort=[{"field": "order"}]))
    columns = {name: index for index, name in enumerate(_COLUMNS)}
    organised = {"excludeByName": dict.fromkeys(_HIDDEN, True), "indexByName": columns, "renameByName": _COLUMNS}
    panel = panel.with_transformation(_transformation("organize", **organised))
    colors = {severity: {"color": color, "index": index} for index, (severity, color) in enumerate(SEVERITIES.items())}
    cell = property_of("custom.cellOptions", {"type": "color-background", "mode": "basic"})
    mapping = property_of("mappings", [{"type": "value", "options": colors}])
    panel = panel.override_by_name("Severity", [mapping, cell, property_of("custom.width", 90)])
    for name, address in (("Run", "runs/${__data.fields.Run}"), ("Finding", "runs/${__data.fields.Run}#findings")):
        link = {"title": "The run's page", "url": f"${{page}}/{address}"}
        panel = panel.override_by_name(name, [property_of("links", [link])])
    for name, width in (("Run", 200), ("Gain", 80), ("Ranks", 120), ("Phase", 100)):
        panel = panel.override_by_name(name, [property_of("custom.width", width)])
    return panel


def phases_of_ranks(expr: str) -> barchart.Panel:
    """Return a stacked bar for each rank. The series have the labels `line` and `phase`."""
    panel = barchart.Panel().title("A step's phases by rank").datasource(SOURCE).unit("s").height(10).span(24)
    panel = panel.description(
        "Mean time per step of the ranks that delay the others most. Equal bars are good. The slow rank has more of a "
        "phase of its own, and does not wait."
    )
    panel = panel.with_target(query(expr, "").instant().format("table"))  # type: ignore[arg-type]
    pivot = {"rowField": "line", "columnField": "phase", "valueField": "Value"}
    panel = panel.with_transformation(_transformation("groupingToMatrix", **pivot))
    panel = panel.x_field("line\\phase").stacking(StackingMode.NORMAL).fill_opacity(90)
    panel = panel.show_value(VisibilityMode.NEVER).legend(VizLegendOptions().show_legend(True))
    for part, color in PART_COLORS.items():
        title = property_of("displayName", PART_TITLES[part])
        panel = panel.override_by_name(part, [color_of(color), title])
    return panel


def _transformation(name: str, **options: object) -> DataTransformerConfig:
    return DataTransformerConfig(name, options=options)
