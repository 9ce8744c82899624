"""The run at a glance: step time over the whole run, with the steps of its findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, Range1d
from bokeh.plotting import figure

from ddpobs import wire
from ddpobs_server.figures.canvas import add_hover, add_quads, mark_longer, steps_plot
from ddpobs_server.figures.figure_data import FigureData
from ddpobs_server.figures.picture import Picture, milliseconds
from ddpobs_server.figures.selection import Selection
from ddpobs_server.figures.theme import SPREAD, Theme, theme_of

NAME, TITLE = "overview", "The run at a glance"
PLACE, SELECTION = 2, ()
_MAX_BINS = 400
_MAX_MEDIANS = 6.0
"""A step with an upload may last as long as thousands: the axis ends here, and longer steps are marked at its end."""
_MAX_INTERVALS = 200
LANES = ("critical", "warning", "info")
_LANE = 0.05
"""Height of a lane of findings above the axis, as a share of it; there is one for each severity."""
_TOOLTIPS = (
    ("steps", "@first{0,0} to @last{0,0}"),
    ("least", "@low{0,0.00} ms"),
    ("median", "@middle{0,0.00} ms"),
    ("most", "@high{0,0.00} ms"),
)


def make(data: FigureData, selection: Selection) -> Picture:
    """Draw the whole run, whatever is selected."""
    return overview(data.step_bins((None, None), _MAX_BINS, None), data.findings(), theme_of(selection))


def overview(columns: Mapping[str, wire.Ints], findings: Sequence[Mapping[str, Any]], theme: Theme) -> Picture:
    """Draw the bins of a run over all ranks.

    Args:
        columns: Of bins: `first`, `last`, and the least, the median and the most of the wall time.
        findings: In the form of the REST API; the index in this list is the field `finding` of the marks.
        theme: Colours.
    """
    if not len(columns["first"]):
        return Picture(NAME, TITLE, "No steps to draw yet. Those of a large run appear within two minutes.")
    first, last = columns["first"], columns["last"]
    steps = (int(first[0]), int(last[-1]) + 1)
    plot, top = _draw(columns, steps, theme)
    marked = _mark_findings(plot, findings, top, steps, theme)
    times = [columns[f"wall_{kind}_ns"] for kind in ("min", "median", "max")]
    typical, longest = (milliseconds(float(ns)) for ns in (np.median(times[1]), times[2].max()))
    time = f"typically {typical}, at most {longest} on any rank"
    summary = f"Step time of steps {steps[0]:,} to {steps[1] - 1:,}: {time}. {marked}"
    rows = [(a, b, *map(milliseconds, ns)) for a, b, *ns in np.stack([first, last, *times]).T.tolist()]
    heads = ("first step", "last step", "least", "median", "most")
    return Picture(NAME, TITLE, summary, plot, heads, rows, {"first": steps[0], "last": steps[1] - 1})


def _draw(columns: Mapping[str, wire.Ints], steps: tuple[int, int], theme: Theme) -> tuple[figure, float]:
    """Draw the step times; return the plot and the upper end of their axis, above which the lanes are."""
    low, middle, high = (columns[f"wall_{kind}_ns"] / 1e6 for kind in ("min", "median", "max"))
    first, end = columns["first"], columns["last"] + 1
    top = max(1e-6, min(float(high.max()), _MAX_MEDIANS * float(np.quantile(middle, 0.95)))) * 1.05
    plot = steps_plot(NAME, theme, steps, 190, y_range=Range1d(start=0, end=top * (1 + _LANE * len(LANES))))
    data = {"first": first, "end": end, "last": columns["last"], "low": low, "middle": middle, "high": high}
    bins = ColumnDataSource(data | {"shown": np.minimum(high, top)}, name="bins")
    spread = add_quads(plot, bins, ("first", "end", "shown", "low"), color=SPREAD, alpha=0.6, line_width=0.5)
    line = np.append(first, steps[1]), np.append(middle, middle[-1])
    plot.step(*line, mode="after", color=theme.ink, line_width=1.5)
    mark_longer(plot, (first + end) / 2, high, top, theme)
    add_hover(plot, [spread], *_TOOLTIPS)
    return plot, top


def _mark_findings(
    plot: Any, findings: Sequence[Mapping[str, Any]], top: float, steps: tuple[int, int], theme: Theme
) -> str:
    """Draw the intervals of findings in a strip above the axis; return a sentence about them."""
    first, end = steps
    marks = [
        (index, finding, interval)
        for index, finding in enumerate(findings)
        for interval in finding["intervals"]
        if interval["to"] >= first and interval["from"] < end
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
    lanes = top * (1 + _LANE * (len(LANES) - np.array([LANES.index(severity) for severity in data["severity"]], float)))
    source = ColumnDataSource(data | {"lane_top": lanes, "lane_bottom": lanes - top * _LANE}, name="findings")
    strip = add_quads(plot, source, ("from", "right", "lane_top", "lane_bottom"), color="color", line_color=theme.paper)
    shaded = [row for row, (_, finding, _) in enumerate(marks) if finding["ranks"]]
    shades = ColumnDataSource({name: [data[name][row] for row in shaded] for name in ("from", "right", "color")})
    add_quads(plot, shades, ("from", "right", top, 0.0), color="color", alpha=0.12, line_color=None)
    add_hover(plot, [strip], ("finding", "@severity: @verdict"), ("steps", "@from{0,0} to @to{0,0}"))
    return _counted(len(marks), "marked", "") + _counted(later, "after these steps", " " if marks else "")


def _counted(count: int, where: str, before: str) -> str:
    return (
        ""
        if not count
        else f"{before}{'One finding is' if count == 1 else f'{count} intervals of findings are'} {where}."
    )
