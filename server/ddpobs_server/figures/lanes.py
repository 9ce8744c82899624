"""Lanes of findings above a figure over steps: one for each severity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource
from bokeh.plotting import figure

from ddpobs.shared.words import STATED_ELSEWHERE
from ddpobs_server.figures.canvas import add_hover, add_quads
from ddpobs_server.figures.theme import Theme

SEVERITIES = ("critical", "warning", "info")
LANE = 0.05
"""Height of a lane, as a share of the axis below the lanes."""
HEIGHT = 1 + LANE * len(SEVERITIES)
"""Height of the axis with its lanes, as a share of the axis below them."""
_MAX_INTERVALS = 200


def mark_findings(
    plot: figure, findings: Sequence[Mapping[str, Any]], top: float, steps: tuple[int, int], theme: Theme
) -> str:
    """Draw the intervals of findings above the axis; return a sentence about them.

    Args:
        plot: A figure over steps, whose axis ends at `top * HEIGHT`.
        findings: In the form of the REST API; the index in this list is the field `finding` of the marks.
        top: Lower end of the lanes.
        steps: The first drawn step, and the end of the last.
        theme: Colours.
    """
    first, end = steps
    marks = [
        (index, finding, interval)
        for index, finding in enumerate(findings)
        for interval in finding["intervals"]
        if finding["code"] not in STATED_ELSEWHERE and interval["to"] >= first and interval["from"] < end
    ][:_MAX_INTERVALS]
    later = sum(interval["from"] >= end for finding in findings for interval in finding["intervals"])
    data: dict[str, list[Any]] = {
        "finding": [index for index, _, _ in marks],
        "verdict": [finding["verdict"] for _, finding, _ in marks],
        "severity": [finding["severity"] for _, finding, _ in marks],
        "color": [theme.severity[finding["severity"]] for _, finding, _ in marks],
        "from": [interval["from"] for _, _, interval in marks],
        "to": [interval["to"] for _, _, interval in marks],
        # A mark of a single step would be too narrow to be seen.
        "right": [max(interval["to"] + 1, interval["from"] + (end - first) / 250) for _, _, interval in marks],
    }
    lane = np.array([SEVERITIES.index(severity) for severity in data["severity"]], float)
    tops = top * (1 + LANE * (len(SEVERITIES) - lane))
    source = ColumnDataSource(data | {"lane_top": tops, "lane_bottom": tops - top * LANE}, name="findings")
    strip = add_quads(plot, source, ("from", "right", "lane_top", "lane_bottom"), color="color", line_color=theme.paper)
    add_hover(plot, [strip], ("finding", "@severity: @verdict"), ("steps", "@from{0,0} to @to{0,0}"))
    return _counted(len(marks), "marked") + _counted(later, "after these steps")


def _counted(count: int, where: str) -> str:
    return f" {'One finding is' if count == 1 else f'{count} intervals of findings are'} {where}." if count else ""
