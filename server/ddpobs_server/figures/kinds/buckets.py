"""The buckets, or the units' collectives: compute, waiting and moving, each against the fit of the run's link."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, Range1d
from bokeh.models.annotations import BoxAnnotation
from bokeh.plotting import figure

from ddpobs import wire
from ddpobs.shared.quantities import counted, duration, size_text, steps_text
from ddpobs.shared.words import UNITS, bucket_name
from ddpobs_server.analysis.communication.bucket_times import BucketTimes
from ddpobs_server.figures.canvas import add_hover, add_legend, add_quads, base_plot
from ddpobs_server.figures.figure_data import Buckets, FigureData
from ddpobs_server.figures.picture import Picture
from ddpobs_server.figures.selection import Selection
from ddpobs_server.figures.theme import COMPUTE, MOVING, PART_TITLES, WAITING_STYLE, Theme, theme_of

NAME, TITLE = "buckets", "Buckets"
PLACE, SELECTION = 5, ("from", "to")
_MAX_BUCKETS = 100
"""Buckets that are drawn: those that take the longest."""
_MAX_TICKS = 40
_SLOPE = 0.8
"""Slope of the names of units below the axis, in radians."""
BAR = "bucket"
"""Name of the mark of the selected bucket."""
_STYLES: tuple[tuple[tuple[str, str, str, str | float], dict[str, Any]], ...] = (
    (("left", "middle", "compute", 0), {"fill_color": COMPUTE, "legend_label": "gradient computation"}),
    (("middle", "right", "move", 0), {"fill_color": MOVING, "legend_label": PART_TITLES["exposed_comm"]}),
    (("middle", "right", "end", "move"), WAITING_STYLE | {"legend_label": PART_TITLES["waiting"]}),
)
_TOOLTIPS = (
    ("parameters", "@parameters"),
    ("compute", "@compute{0,0.000} ms"),
    ("waiting", "@wait{0,0.000} ms"),
    ("moving", "@move{0,0.000} ms"),
    ("by the fit", "@fitted{0,0.000} ms"),
    ("bandwidth", "@bandwidth{0,0.000} GB/s"),
)


def make(data: FigureData, selection: Selection) -> Picture:
    """Draw the buckets of the selected steps."""
    return buckets(data.views.buckets(selection.first, selection.last), data.buckets(), theme_of(selection))


def buckets(times: BucketTimes | None, names: Buckets, theme: Theme) -> Picture:
    """Draw the mean times of the buckets.

    Args:
        times: Of all buckets; None if no spans are stored.
        names: Facts of the buckets.
        theme: Colours.
    """
    heading = names.parts.heading
    if times is None or not len(times):
        return Picture(NAME, heading, f"No spans of {heading.lower()} are stored in this range.")
    longest_ns = np.maximum(times.wait_ns + times.move_ns, times.compute_ns)
    drawn = np.sort(np.argsort(-longest_ns, kind="stable")[:_MAX_BUCKETS])
    bars = _bars(times, names, drawn)
    times_of = {"compute": "compute", "wait": "waiting", "move": "moving", "fitted": "by the fit"}
    shown_times = {name: title for name, title in times_of.items() if bars[name].any()}
    columns = ("title", "size", *shown_times, "bandwidth")
    rows = [
        (label, size, *(duration(ms * 1e6) for ms in values), f"{bandwidth:.3g} GB/s")
        for label, size, *values, bandwidth in zip(*(bars[name] for name in columns), strict=True)
    ]
    heads = (names.parts.noun, "size", *shown_times.values(), "bandwidth")
    shown = {"first": times.first, "last": times.last}
    return Picture(NAME, heading, _summary(times, bars, names), _draw(bars, names, theme), heads, rows, shown)


def _bars(times: BucketTimes, names: Buckets, rows: wire.Ints) -> dict[str, Any]:
    """Return facts of the drawn buckets, with times in milliseconds, and the sides of their bars."""
    module, revision, bucket = (values[rows].tolist() for values in (times.module, times.revision, times.bucket))
    wait, move, compute, fitted = (
        values[rows] / 1e6 for values in (times.wait_ns, times.move_ns, times.compute_ns, times.fitted_ns)
    )
    index, keys = np.arange(len(rows)), list(zip(module, revision, bucket, strict=True))
    return {
        "left": index + 0.1,
        "middle": index + 0.5,
        "right": index + 0.9,
        "label": [bucket_name(*place) for place in zip(module, bucket, strict=True)],
        "tick": list(map(names.tick, keys)),
        "title": list(map(names.title, keys)),
        "phrase": list(map(names.phrase, keys)),
        "module": times.module[rows],
        "number": times.bucket[rows],
        "parameters": list(map(names.parameters, keys)),
        "size": [size_text(size) for size in times.size_bytes[rows].tolist()],
        "compute": compute,
        "wait": wait,
        "move": move,
        "end": wait + move,
        "fitted": fitted,
        "bandwidth": np.where(move > 0, times.size_bytes[rows] / np.maximum(1.0, times.move_ns[rows]), 0.0),
    }


def _summary(times: BucketTimes, bars: Mapping[str, Any], names: Buckets) -> str:
    count, worst = len(bars["label"]), int(np.argmax(bars["end"]))
    wait_ns, move_ns = (bars[name][worst] * 1e6 for name in ("wait", "move"))
    waits = f"waits {duration(wait_ns)} for the last rank and " if wait_ns else ""
    longest = bars["phrase"][worst]
    return (
        f"Means over all ranks in {steps_text(times.first, times.last)}: {counted(len(times), names.parts.row)}"
        f"{f', the {count} that take the longest are drawn' if count < len(times) else ''}. "
        f"{longest[0].upper()}{longest[1:]} communicates longest: it {waits}moves {duration(move_ns)}."
    )


def _draw(bars: dict[str, Any], names: Buckets, theme: Theme) -> figure:
    count = len(bars["label"])
    top = 1.08 * max(1e-6, *(float(bars[name].max()) for name in ("end", "compute", "fitted")))
    x_range, y_range = Range1d(start=0, end=count, bounds=(0, count)), Range1d(start=0, end=top)
    plot = base_plot(NAME, theme, 240, x_range=x_range, y_range=y_range)
    plot.toolbar_location = None
    source = ColumnDataSource(bars, name="bars")
    glyphs = [
        add_quads(plot, source, sides, line_color=theme.paper, line_width=0.5, **style)
        for sides, style in _STYLES
        if bars[sides[2]].any()
    ]
    if bars["fitted"].any():
        style: dict[str, Any] = {"color": theme.ink, "line_width": 2, "legend_label": "moving, by the fit"}
        plot.segment("middle", "fitted", "right", "fitted", source=source, **style)
    add_hover(plot, glyphs, (names.parts.noun, "@title, @size"), *_TOOLTIPS)
    ticks = np.arange(count)[:: -(-count // _MAX_TICKS)].tolist()
    plot.xaxis.ticker = [index + 0.5 for index in ticks]
    plot.xaxis.major_label_overrides = {index + 0.5: bars["tick"][index] for index in ticks}
    if names.parts is UNITS:
        plot.xaxis.major_label_orientation = _SLOPE
    plot.xaxis.axis_label = f"{names.parts.row}, in the order of their launch"
    plot.xgrid.grid_line_color = None
    plot.add_layout(BoxAnnotation(name=BAR, visible=False, fill_alpha=0, line_color=theme.ink, line_width=2))
    add_legend(plot, theme)
    return plot
