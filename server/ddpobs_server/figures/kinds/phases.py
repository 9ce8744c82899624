"""Step time by phase: the median of each bin of steps, stacked, and the steps of the findings.

Waiting for ranks and moving data are apart. Without a selection it shows the whole run, and otherwise the selected
steps with half as many before and after them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, Range1d
from bokeh.plotting import figure

from ddpobs import wire
from ddpobs.shared.quantities import duration, steps_text
from ddpobs.shared.words import percent
from ddpobs_server.analysis.steps.joined_steps import Floats
from ddpobs_server.analysis.steps.waiting import STEP_PARTS
from ddpobs_server.figures.canvas import add_hover, add_legend, add_quads, mark_longer, steps_plot
from ddpobs_server.figures.figure_data import FigureData
from ddpobs_server.figures.lanes import HEIGHT, mark_findings
from ddpobs_server.figures.picture import Picture
from ddpobs_server.figures.selection import Selection
from ddpobs_server.figures.theme import HATCHES, PART_COLORS, PART_TITLES, Theme, theme_of

NAME, TITLE = "phases", "Step time by phase"
PLACE, SELECTION = 2, ("from", "to", "rank")
_MAX_BINS = 250
_MIN_MARGIN = 10
"""Steps that are drawn before and after the selected ones, at least."""
_MAX_MEDIANS = 3.0
"""The axis ends at so many times the slower steps' median; longer steps are marked at its end."""
_MIN_EXCESS = 1.2
"""The longest step is told if it takes so many times the typical one."""
_NO_LIMIT = 2**62
_LATER = "Those of a large run appear within two minutes."
_MIN_SHARE = 0.005
"""Share of the time from which a phase is named."""
_TOOLTIPS = (
    ("steps", "@first{0,0} to @last{0,0}"),
    ("step time", "@total{0,0.00} ms"),
    ("longest", "@most{0,0.00} ms"),
    *((PART_TITLES[part], f"@{part}{{0,0.00}} ms") for part in STEP_PARTS),
)


def make(data: FigureData, selection: Selection) -> Picture:
    """Draw the selected steps of the selected rank, and what is around them."""
    chosen = (selection.first, selection.last)
    bins = data.step_bins(_around(*chosen), _MAX_BINS, selection.rank)
    return phases(bins, chosen, selection.rank, data.findings(), theme_of(selection))


def _around(first: int | None, last: int | None) -> tuple[int | None, int | None]:
    if first is None or last is None:
        return first, last
    margin = max(_MIN_MARGIN, (last - first + 1) // 2)
    return max(0, first - margin), last + margin


def phases(
    columns: Mapping[str, wire.Ints],
    chosen: tuple[int | None, int | None],
    rank: int | None,
    findings: Sequence[Mapping[str, Any]],
    theme: Theme,
) -> Picture:
    """Draw the bins of one rank, or those over all ranks.

    Args:
        columns: Of bins: `first`, `last`, the median of each phase, and the median and the most of the wall time.
        chosen: First and last selected step, which the summary is about; None for no limit.
        rank: The rank; None for all.
        findings: In the form of the REST API.
        theme: Colours.
    """
    of = "all ranks" if rank is None else f"rank {rank}"
    first, last = columns["first"], columns["last"]
    is_chosen = (last >= (chosen[0] or 0)) & (first <= (_NO_LIMIT if chosen[1] is None else chosen[1]))
    if not is_chosen.any():
        return Picture(NAME, TITLE, f"No step of {of} is stored in this range. {_LATER}")
    medians = _parts(columns)
    total = np.sum(list(medians.values()), axis=0)
    steps = (int(first[0]), int(last[-1]) + 1)
    plot, top = _draw(columns, medians, total, theme)
    marked = mark_findings(plot, findings, top, steps, theme)
    summary = _summary(columns, is_chosen, medians, of) + marked
    times = np.stack([total, columns["wall_max_ns"] / 1e6, *medians.values()], axis=1) * 1e6
    rows = [(int(a), int(b), *map(duration, ns)) for a, b, ns in zip(first, last, times.tolist(), strict=True)]
    heads = ("first step", "last step", "step time", "longest", *(PART_TITLES[part] for part in STEP_PARTS))
    return Picture(NAME, TITLE, summary, plot, heads, rows, {"first": steps[0], "last": steps[1] - 1})


def _summary(columns: Mapping[str, wire.Ints], is_chosen: Any, medians: Mapping[str, Floats], of: str) -> str:
    """Describe the selected bins: the typical and the longest step, and the shares of its parts."""
    chosen = {part: values[is_chosen] for part, values in medians.items()}
    total = np.sum(list(chosen.values()), axis=0)
    typical, longest = float(np.median(total)) * 1e6, float(columns["wall_max_ns"][is_chosen].max())
    steps = steps_text(columns["first"][is_chosen][0], columns["last"][is_chosen][-1]).capitalize() + f" of {of}"
    most = f", at most {duration(longest)}" if longest > _MIN_EXCESS * typical else ""
    return f"{steps}: a median of {duration(typical)} a step{most}; {_shares(chosen, total)}."


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


def _draw(
    columns: Mapping[str, wire.Ints], medians: Mapping[str, Floats], total: Floats, theme: Theme
) -> tuple[figure, float]:
    """Draw the bins; return the plot and the upper end of their axis, above which the lanes of findings are."""
    first, end, most = columns["first"], columns["last"] + 1, columns["wall_max_ns"] / 1e6
    longest = np.maximum(total, most)
    top = 1.05 * max(1e-6, min(float(longest.max()), _MAX_MEDIANS * float(np.quantile(total, 0.95)) or np.inf))
    y_range = Range1d(start=0, end=top * HEIGHT)
    plot = steps_plot(NAME, theme, (int(first[0]), int(end[-1])), 290, y_range=y_range)
    data = {"first": first, "end": end, "last": columns["last"], "most": most, "total": total, **medians}
    below = np.zeros(len(first))
    for phase, values in medians.items():
        data[f"{phase}_low"], below = below, below + values
        data[f"{phase}_high"] = below
    bins = ColumnDataSource(data, name="bins")
    glyphs = []
    for part in STEP_PARTS:
        if not medians[part].any():
            continue
        style = {"color": PART_COLORS[part], "line_width": 0.3, "legend_label": PART_TITLES[part]}
        style |= HATCHES.get(part, {})
        glyphs.append(add_quads(plot, bins, ("first", "end", f"{part}_high", f"{part}_low"), **style))
    line = np.append(first, end[-1]), np.minimum(np.append(longest, longest[-1]), top)
    plot.step(*line, mode="after", color=theme.ink, line_width=1, line_alpha=0.7, legend_label="longest step")
    add_hover(plot, glyphs, *_TOOLTIPS)
    mark_longer(plot, (first + end) / 2, longest, top, theme)
    add_legend(plot, theme)
    return plot, top
