"""Step time by phase: the median of each bin of steps, stacked; waiting for ranks and moving data apart."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from bokeh.models import ColumnDataSource, Range1d
from bokeh.plotting import figure

from ddpobs import wire
from ddpobs.shared.words import percent
from ddpobs_server.analysis.steps.joined_steps import Floats
from ddpobs_server.analysis.steps.waiting import STEP_PARTS
from ddpobs_server.figures.canvas import add_hover, add_legend, add_quads, mark_longer, steps_plot
from ddpobs_server.figures.figure_data import FigureData
from ddpobs_server.figures.picture import Picture, milliseconds
from ddpobs_server.figures.selection import Selection
from ddpobs_server.figures.theme import HATCHES, PART_COLORS, PART_TITLES, Theme, theme_of

NAME, TITLE = "phases", "Step time by phase"
PLACE, SELECTION = 3, ("from", "to", "rank")
_MAX_BINS = 250
_MAX_MEDIANS = 3.0
"""The axis ends at this many median steps; longer steps are marked at its end."""
_MIN_SHARE = 0.005
"""Share of the time from which a phase is named."""
_TOOLTIPS = (
    ("steps", "@first{0,0} to @last{0,0}"),
    ("step time", "@total{0,0.00} ms"),
    ("longest", "@most{0,0.00} ms"),
    *((PART_TITLES[part], f"@{part}{{0,0.00}} ms") for part in STEP_PARTS),
)


def make(data: FigureData, selection: Selection) -> Picture:
    """Draw the selected steps of the selected rank."""
    bins = data.step_bins((selection.first, selection.last), _MAX_BINS, selection.rank)
    return phases(bins, selection.rank, theme_of(selection))


def phases(columns: Mapping[str, wire.Ints], rank: int | None, theme: Theme) -> Picture:
    """Draw the bins of one rank, or those over all ranks.

    Args:
        columns: Of bins: `first`, `last`, the median of each phase, and the median and the most of the wall time.
        rank: The rank; None for all.
        theme: Colours.
    """
    of = "all ranks" if rank is None else f"rank {rank}"
    if not len(columns["first"]):
        return Picture(NAME, TITLE, f"No step of {of} is stored in this range.")
    first, last = columns["first"], columns["last"]
    medians = _parts(columns)
    total = np.sum(list(medians.values()), axis=0)
    typical = milliseconds(float(np.median(total)) * 1e6)
    summary = f"Steps {first[0]:,} to {last[-1]:,} of {of}: {typical} a step; {_shares(medians, total)}."
    times = np.stack([total, *medians.values()], axis=1) * 1e6
    rows = [(int(a), int(b), *map(milliseconds, ns)) for a, b, ns in zip(first, last, times.tolist(), strict=True)]
    heads = ("first step", "last step", "step time", *(PART_TITLES[part] for part in STEP_PARTS))
    shown = {"first": int(first[0]), "last": int(last[-1])}
    return Picture(NAME, TITLE, summary, _draw(columns, medians, total, theme), heads, rows, shown)


def _parts(columns: Mapping[str, wire.Ints]) -> dict[str, Floats]:
    """Return the median of each part of a step, in milliseconds."""
    medians = {part: columns[f"{part}_median_ns"] / 1e6 for part in STEP_PARTS}
    medians["waiting"] = np.minimum(medians["waiting"], medians["exposed_comm"])
    return medians | {"exposed_comm": medians["exposed_comm"] - medians["waiting"]}


def _shares(medians: Mapping[str, Floats], total: Floats) -> str:
    """Name the parts of a step with their shares of the time, the largest first."""
    whole = max(1e-9, float(total.sum()))
    shares = {phase: float(values.sum()) / whole for phase, values in medians.items()}
    named = [phase for phase in sorted(shares, key=lambda phase: -shares[phase]) if shares[phase] >= _MIN_SHARE]
    return ", ".join(f"{PART_TITLES[phase]} {percent(shares[phase])}" for phase in named)


def _draw(columns: Mapping[str, wire.Ints], medians: Mapping[str, Floats], total: Floats, theme: Theme) -> figure:
    first, end, most = columns["first"], columns["last"] + 1, columns["wall_max_ns"] / 1e6
    typical, longest = float(np.median(total)), max(float(total.max()), float(most.max()), 1e-6)
    top = 1.05 * (min(longest, _MAX_MEDIANS * typical) if typical else longest)
    plot = steps_plot(NAME, theme, (int(first[0]), int(end[-1])), 260, y_range=Range1d(start=0, end=top))
    data = {"first": first, "end": end, "last": columns["last"], "most": most, "total": total, **medians}
    below = np.zeros(len(first))
    for phase, values in medians.items():
        data[f"{phase}_low"], below = below, below + values
        data[f"{phase}_high"] = below
    bins = ColumnDataSource(data, name="bins")
    glyphs = []
    for part in STEP_PARTS:
        style = {"color": PART_COLORS[part], "line_width": 0.3, "legend_label": PART_TITLES[part]}
        style |= HATCHES.get(part, {})
        glyphs.append(add_quads(plot, bins, ("first", "end", f"{part}_high", f"{part}_low"), **style))
    add_hover(plot, glyphs, *_TOOLTIPS)
    mark_longer(plot, (first + end) / 2, np.maximum(total, most), top, theme)
    add_legend(plot, theme)
    return plot
