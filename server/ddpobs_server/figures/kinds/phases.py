"""Step time by phase: the median of each bin of steps, stacked."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from bokeh.models import ColumnDataSource, Range1d

from ddpobs import wire
from ddpobs.shared.words import percent
from ddpobs_server.figures.canvas import add_hover, add_legend, add_quads, mark_longer, steps_plot
from ddpobs_server.figures.figure_data import FigureData
from ddpobs_server.figures.picture import Picture, milliseconds
from ddpobs_server.figures.selection import Selection
from ddpobs_server.figures.theme import PHASE_COLORS, PHASE_TITLES, Theme, theme_of

NAME, TITLE = "phases", "Step time by phase"
PLACE, SELECTION = 3, ("from", "to", "rank")
_MAX_BINS = 250
_MAX_MEDIANS = 3.0
"""The axis ends at this many median steps; longer steps are marked at its end."""


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
    first, end = columns["first"], columns["last"] + 1
    medians = {phase: columns[f"{phase}_median_ns"] / 1e6 for phase in wire.PHASES}
    total, most = np.sum(list(medians.values()), axis=0), columns["wall_max_ns"] / 1e6
    typical, longest = float(np.median(total)), max(float(total.max()), float(most.max()), 1e-6)
    top = 1.05 * (min(longest, _MAX_MEDIANS * typical) if typical else longest)
    plot = steps_plot(NAME, theme, (int(first[0]), int(end[-1])), 260, y_range=Range1d(start=0, end=top))
    data = {"first": first, "end": end, "last": columns["last"], "most": most, "total": total, **medians}
    below = np.zeros(len(first))
    for phase, values in medians.items():
        data[f"{phase}_low"], below = below, below + values
        data[f"{phase}_high"] = below
    bins = ColumnDataSource(data, name="bins")
    tooltips = [
        ("steps", "@first{0,0} to @last{0,0}"),
        ("step time", "@total{0,0.00} ms"),
        ("longest", "@most{0,0.00} ms"),
    ]
    tooltips += [(PHASE_TITLES[phase], f"@{phase}{{0,0.00}} ms") for phase in wire.PHASES]
    glyphs = []
    for phase in wire.PHASES:
        style = {"color": PHASE_COLORS[phase], "line_width": 0.3, "legend_label": PHASE_TITLES[phase]}
        glyphs.append(add_quads(plot, bins, ("first", "end", f"{phase}_high", f"{phase}_low"), **style))
    add_hover(plot, glyphs, *tooltips)
    mark_longer(plot, (first + end) / 2, np.maximum(total, most), top, theme)
    add_legend(plot, theme)
    shares = {phase: float(values.sum()) / max(1e-9, float(total.sum())) for phase, values in medians.items()}
    parts = ", ".join(
        f"{PHASE_TITLES[phase]} {percent(share)}"
        for phase, share in sorted(shares.items(), key=lambda item: -item[1])
        if share >= 0.005
    )
    summary = f"Steps {first[0]:,} to {end[-1] - 1:,} of {of}: {milliseconds(typical * 1e6)} a step; {parts}."
    rows = [
        (
            int(a),
            int(b),
            milliseconds(t * 1e6),
            *(milliseconds(float(medians[phase][row]) * 1e6) for phase in wire.PHASES),
        )
        for row, (a, b, t) in enumerate(zip(first.tolist(), columns["last"].tolist(), total.tolist(), strict=True))
    ]
    heads = ("first step", "last step", "step time", *PHASE_TITLES.values())
    return Picture(NAME, TITLE, summary, plot, heads, rows, {"first": int(first[0]), "last": int(end[-1]) - 1})
