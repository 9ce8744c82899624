"""The buckets: compute, waiting for the last rank, and moving, each against the fit of the run's link."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, Range1d
from bokeh.models.annotations import BoxAnnotation

from ddpobs_server.analysis.communication.bucket_times import BucketTimes
from ddpobs_server.figures.canvas import add_hover, add_legend, add_quads, base_plot
from ddpobs_server.figures.figure_data import FigureData
from ddpobs_server.figures.picture import Picture, milliseconds, module_bucket, size_text
from ddpobs_server.figures.selection import Selection
from ddpobs_server.figures.theme import COMPUTE, MOVING, WAITING_STYLE, Theme, theme_of

NAME, TITLE = "buckets", "Buckets"
PLACE, SELECTION = 6, ("from", "to")
_MAX_BUCKETS = 100
"""Buckets that are drawn: those that take the longest."""
BAR = "bucket"
"""Name of the mark of the selected bucket."""


def make(data: FigureData, selection: Selection) -> Picture:
    """Draw the buckets of the selected steps."""
    return buckets(data.views.buckets(selection.first, selection.last), data.buckets(), theme_of(selection))


def buckets(times: BucketTimes | None, names: Mapping[tuple[int, int, int], tuple[int, str]], theme: Theme) -> Picture:
    """Draw the mean times of the buckets.

    Args:
        times: Of all buckets; None if no spans are stored.
        names: Size in bytes and names of parameters, by module, revision and bucket.
        theme: Colours.
    """
    if times is None or not len(times):
        return Picture(NAME, TITLE, "No spans of buckets are stored in this range.")
    comm_ns = times.wait_ns + times.move_ns
    rows = np.sort(np.argsort(-np.maximum(comm_ns, times.compute_ns), kind="stable")[:_MAX_BUCKETS])
    labels = [
        module_bucket(module, bucket) for module, bucket in zip(times.module[rows], times.bucket[rows], strict=True)
    ]
    keys = zip(times.module[rows].tolist(), times.revision[rows].tolist(), times.bucket[rows].tolist(), strict=True)
    index = np.arange(len(rows))
    wait, move, compute, fitted = (
        values[rows] / 1e6 for values in (times.wait_ns, times.move_ns, times.compute_ns, times.fitted_ns)
    )
    bandwidth = np.where(move > 0, times.size_bytes[rows] / np.maximum(1.0, times.move_ns[rows]), 0.0)
    data: dict[str, Any] = {
        "left": index + 0.1,
        "middle": index + 0.5,
        "right": index + 0.9,
        "label": labels,
        "module": times.module[rows],
        "number": times.bucket[rows],
        "parameters": [names.get(key, (0, ""))[1] for key in keys],
        "size": [size_text(size) for size in times.size_bytes[rows].tolist()],
        "compute": compute,
        "wait": wait,
        "move": move,
        "end": wait + move,
        "fitted": fitted,
        "bandwidth": bandwidth,
    }
    top = 1.08 * max(1e-6, float((wait + move).max()), float(compute.max()), float(fitted.max()))
    count = len(rows)
    plot = base_plot(
        NAME, theme, 240, x_range=Range1d(start=0, end=count, bounds=(0, count)), y_range=Range1d(start=0, end=top)
    )
    plot.toolbar_location = None
    source = ColumnDataSource(data, name="bars")
    styles: list[tuple[tuple[str, str, str, str | float], dict[str, Any]]] = [
        (("left", "middle", "compute", 0), {"fill_color": COMPUTE, "legend_label": "gradient computation"}),
        (("middle", "right", "move", 0), {"fill_color": MOVING, "legend_label": "all-reduce: moving"}),
        (("middle", "right", "end", "move"), WAITING_STYLE | {"legend_label": "all-reduce: waiting"}),
    ]
    glyphs = [
        add_quads(plot, source, sides, line_color=theme.paper, line_width=0.5, **style) for sides, style in styles
    ]
    if fitted.any():
        plot.segment(
            "middle",
            "fitted",
            "right",
            "fitted",
            source=source,
            color=theme.ink,
            line_width=2,
            legend_label="moving, by the fit",
        )
    add_hover(
        plot,
        glyphs,
        ("bucket", "@label, @size"),
        ("parameters", "@parameters"),
        ("compute", "@compute{0,0.000} ms"),
        ("waiting", "@wait{0,0.000} ms"),
        ("moving", "@move{0,0.000} ms"),
        ("by the fit", "@fitted{0,0.000} ms"),
        ("bandwidth", "@bandwidth{0,0.000} GB/s"),
    )
    every = -(-count // 40)
    plot.xaxis.ticker = (index[::every] + 0.5).tolist()
    plot.xaxis.major_label_overrides = {i + 0.5: labels[i] for i in index[::every].tolist()}
    plot.xaxis.axis_label = "bucket, in the order of their launch"
    plot.xgrid.grid_line_color = None
    plot.add_layout(BoxAnnotation(name=BAR, visible=False, fill_alpha=0, line_color=theme.ink, line_width=2))
    add_legend(plot, theme)
    rows_shown = [
        (label, size, *(milliseconds(ms * 1e6) for ms in values), f"{gb:.3g} GB/s")
        for label, size, gb, *values in zip(labels, data["size"], bandwidth, compute, wait, move, fitted, strict=True)
    ]
    worst = int(np.argmax(wait + move))
    summary = (
        f"Means over all ranks in steps {times.first:,} to {times.last:,}: {len(times):,} buckets"
        f"{f', the {count} that take the longest are drawn' if count < len(times) else ''}. Bucket {labels[worst]} "
        f"communicates longest: it waits {milliseconds(wait[worst] * 1e6)} for the last rank and moves "
        f"{milliseconds(move[worst] * 1e6)}."
    )
    heads = ("bucket", "size", "compute", "waiting", "moving", "by the fit", "bandwidth")
    return Picture(NAME, TITLE, summary, plot, heads, rows_shown, {"first": times.first, "last": times.last})
