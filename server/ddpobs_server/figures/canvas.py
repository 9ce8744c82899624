"""An empty plot in the page's colours, with the marks that the page moves: selection, step and pointer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.models import (
    AdaptiveTicker,
    BoxSelectTool,
    ColumnDataSource,
    FactorRange,
    HoverTool,
    InlineStyleSheet,
    NumeralTickFormatter,
    PanTool,
    PrintfTickFormatter,
    Range1d,
    ResetTool,
    WheelZoomTool,
)
from bokeh.models.annotations import BoxAnnotation, Span
from bokeh.plotting import figure

from ddpobs_server.analysis.steps.joined_steps import Floats
from ddpobs_server.figures.theme import Theme

FONT = "system-ui, sans-serif"
LEGEND_ROW = 26
"""Height of a row of a legend."""
_TOOLS = (
    ":host {{ --bokeh-icon-color: {icon}; }} :focus-visible {{ outline: 2px solid {focus} !important; "
    "outline-offset: -2px; }}"
)
"""Style of the tools, and of the one that the keyboard is at."""
SELECTION, STEP, POINTER = "selection", "step", "pointer"
"""Names of the marks."""


def steps_plot(name: str, theme: Theme, steps: tuple[int, int], height: int, **options: Any) -> figure:
    """Return a plot over steps, from the first to the end. A drag selects steps."""
    first, end = steps
    margin = max(1, (end - first) // 2)
    x_range = Range1d(start=first, end=end, bounds=(first - margin, end + margin), min_interval=2)
    plot = base_plot(name, theme, height, x_range=x_range, **options)
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
    plot.xaxis.axis_label = "step"
    plot.xaxis.ticker = AdaptiveTicker(min_interval=1)
    box = BoxSelectTool(dimensions="width")
    plot.add_tools(box, PanTool(dimensions="width"), WheelZoomTool(dimensions="width"), ResetTool())
    plot.toolbar.active_drag = box
    plot.add_layout(
        BoxAnnotation(name=SELECTION, visible=False, fill_color=theme.ink, fill_alpha=0.08, line_color=theme.ink)
    )
    plot.add_layout(Span(name=STEP, dimension="height", visible=False, line_color=theme.ink, line_width=2))
    return plot


def base_plot(name: str, theme: Theme, height: int, **options: Any) -> figure:
    """Return a plot as wide as its place on the page."""
    plot = figure(
        height=height,
        sizing_mode="stretch_width",
        tools="",
        toolbar_location="above",
        background_fill_color=theme.paper,
        border_fill_color=theme.paper,
        outline_line_color=None,
        **options,
    )
    plot.toolbar.logo = None
    plot.toolbar.stylesheets = [InlineStyleSheet(css=_TOOLS.format(icon=theme.muted, focus=theme.severity["info"]))]
    plot.name = name
    for axis in plot.axis:
        axis.axis_label_text_font = axis.major_label_text_font = FONT
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_color = axis.major_label_text_color = theme.muted
        axis.axis_line_color = axis.major_tick_line_color = theme.line
        axis.minor_tick_line_color = None
    plot.grid.grid_line_color = theme.line
    if not isinstance(plot.y_range, FactorRange):
        plot.yaxis.formatter = PrintfTickFormatter(format="%.6g ms")
    plot.add_layout(Span(name=POINTER, dimension="height", visible=False, line_color=theme.muted, line_dash="dotted"))
    return plot


def add_quads(
    plot: figure,
    source: ColumnDataSource,
    sides: tuple[str | float, str | float, str | float, str | float],
    **style: Any,
) -> Any:
    """Draw rectangles; `sides` are left, right, top and bottom. They look the same when some are selected."""
    left, right, top, bottom = sides
    return plot.quad(left, right, top, bottom, source=source, nonselection_alpha=style.get("alpha", 1.0), **style)


def add_hover(plot: figure, renderers: Sequence[Any], *tooltips: tuple[str, str]) -> None:
    """Show these fields of the glyph under the pointer."""
    plot.add_tools(HoverTool(renderers=list(renderers), tooltips=list(tooltips), point_policy="follow_mouse"))


def add_legend(plot: figure, theme: Theme) -> None:
    """Put the legend above the plot; a click on an entry hides its glyphs."""
    if not plot.legend:  # Nothing is drawn that has a name.
        return
    plot.add_layout(plot.legend[0], "above")
    legend = plot.legend[0]
    legend.orientation, legend.click_policy = "horizontal", "hide"
    columns = min(theme.legend_columns, len(legend.items))
    legend.ncols = columns
    legend.label_height = legend.glyph_height = legend.glyph_width = 14
    plot.height = (plot.height or 0) + LEGEND_ROW * (-(-len(legend.items) // columns) - 1)
    legend.background_fill_color, legend.border_line_color = theme.paper, None
    legend.label_text_color, legend.label_text_font = theme.ink, FONT
    legend.label_text_font_size, legend.padding, legend.spacing = "12px", 2, 10  # type: ignore[assignment]


def mark_longer(plot: figure, x: Floats, times_ms: Floats, top: float, theme: Theme) -> None:
    """Mark times beyond the end of the axis with a triangle at its end."""
    rows = np.flatnonzero(times_ms > top)
    data = {"x": x[rows], "y": np.full(len(rows), top * 0.98), "time": times_ms[rows]}
    marks = plot.scatter(
        "x", "y", source=ColumnDataSource(data, name="longer"), marker="triangle", size=8, color=theme.ink
    )
    add_hover(plot, [marks], ("longer than the axis", "@time{0,0.0} ms"))
