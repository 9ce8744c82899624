"""Tables of the dashboards: findings, and the phases of ranks."""

from __future__ import annotations

from ddpobs_server.figures.theme import PART_COLORS, PART_TITLES
from grafana_foundation_sdk.builders import barchart, table
from grafana_foundation_sdk.builders.common import VizLegendOptions
from grafana_foundation_sdk.models.common import StackingMode, VisibilityMode
from grafana_foundation_sdk.models.dashboard import DataTransformerConfig, DynamicConfigValue

from dashboards.panels import RUN, SEVERITIES, SOURCE, color_of, property_of, query
from ddpobs.shared.words import STATED_ELSEWHERE

_COLUMNS = {
    "severity": "Severity",
    "run": "Run",
    "title": "Finding",
    "cause": "Cause",
    "where": "Where",
    "remedy": "Do",
    "Value": "Gain",
    "code": "Help",
}
_HIDDEN = ("Time", "order", "ranks", "phase")
_WIDTHS = {"Severity": 90, "Run": 150, "Finding": 240, "Cause": 260, "Where": 200, "Gain": 80, "Help": 140}
"""Widths of the columns in pixels; the remedies have the rest."""
_LINKS = {
    "Run": {"title": "The run's page", "url": "${page}/runs/${__data.fields.Run}"},
    "Finding": {"title": "The run's findings", "url": "${page}/runs/${__data.fields.Run}#findings"},
    "Help": {"title": "What it means, and what to do", "url": "${page}/help/${__value.raw}"},
}
_LABELS = "run, code, severity, title, ranks, phase"
_EXPLANATION = "cause, where, remedy"
_ON_THE_PAGE = "See cause and remedy on the run's page."
_MAX_FINDINGS = 50


def findings(span: int) -> table.Panel:
    """Return the findings of the chosen runs, the most severe first, then by gain."""
    panel = table.Panel().title("Findings").datasource(SOURCE).unit("percentunit").height(10).span(span)
    panel = panel.description(
        f"The {_MAX_FINDINGS} most severe findings, then by gain. An empty table is good. A finding leads to the run's "
        "page, which has all its parts, and its code to help."
    )
    panel = panel.with_target(query(_explained_findings(), "").instant().format("table"))  # type: ignore[arg-type]
    panel = panel.with_transformation(_transformation("sortBy", sort=[{"field": "order"}]))
    columns = {name: index for index, name in enumerate(_COLUMNS)}
    organised = {"excludeByName": dict.fromkeys(_HIDDEN, True), "indexByName": columns, "renameByName": _COLUMNS}
    panel = panel.with_transformation(_transformation("organize", **organised))
    for name in _COLUMNS.values():
        panel = panel.override_by_name(name, _column(name))
    return panel


def _column(name: str) -> list[DynamicConfigValue]:
    properties = [property_of("custom.width", _WIDTHS[name])] if name in _WIDTHS else []
    if name in _LINKS:
        properties.append(property_of("links", [_LINKS[name]]))
    if name == "Severity":
        colors = {key: {"color": color, "index": index} for index, (key, color) in enumerate(SEVERITIES.items())}
        properties.append(property_of("mappings", [{"type": "value", "options": colors}]))
        cell: dict[str, object] = {"type": "color-background", "mode": "basic"}
    else:
        cell = {"type": "auto", "wrapText": True}
    return [*properties, property_of("custom.cellOptions", cell)]


def _explained_findings() -> str:
    """Return the findings that are shown; failures, hangs and slow ranks with cause, place and remedy."""
    hangs = f'label_join(ddpobs_hang_info{{{RUN}}}, "where", ", ", "where", "place")'
    hangs = f'label_replace({hangs}, "where", "$1", "where", ", (.*)")'
    explained = [
        _with_explanation('code="straggler"', f"ddpobs_straggler_info{{{RUN}}}", "run, severity, ranks, phase"),
        _with_explanation('code="hang"', hangs, "run, ranks"),
        _with_explanation(
            'code!~"straggler|hang"', f"ddpobs_failure_info{{{RUN}}}", "run, code, severity, title, ranks"
        ),
    ]
    rows = f"{' or '.join(explained)} or on ({_LABELS}) {_found()}"
    rows = f'label_replace({rows}, "remedy", "{_ON_THE_PAGE}", "remedy", "")'
    for order, severity in enumerate(SEVERITIES, 1):
        rows = f'label_replace({rows}, "order", "{order}", "severity", "{severity}")'
    return f"sort_desc({rows} and on ({_LABELS}) topk({_MAX_FINDINGS}, {_by_severity()}))"


def _found(which: str = "") -> str:
    shown = f'{RUN},code!~"{"|".join(STATED_ELSEWHERE)}"'
    return f"max by ({_LABELS}) (ddpobs_finding_gain_ratio{{{','.join(filter(None, (shown, which)))}}})"


def _with_explanation(which: str, explanations: str, on: str) -> str:
    """Return findings with their explanation; of several of one finding, only one, because a join needs exactly one."""
    one = f"topk by ({on}) (1, max by ({on}, {_EXPLANATION}) ({explanations}))"
    return f"{_found(which)} * on ({on}) group_left ({_EXPLANATION}) {one}"


def _by_severity() -> str:
    """Return each finding with a number that is larger for one to be shown before another: a gain is at most 1."""
    return " or ".join(f"{_found(_severity(name))} - {order}" for order, name in enumerate(SEVERITIES))


def _severity(name: str) -> str:
    return f'severity="{name}"'


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
