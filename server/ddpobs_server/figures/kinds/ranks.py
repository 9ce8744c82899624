"""Ranks by steps: the delay that each rank caused."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from bokeh.models import (
    AdaptiveTicker,
    ColumnDataSource,
    HoverTool,
    LinearColorMapper,
    PrintfTickFormatter,
    Range1d,
)
from bokeh.models.annotations import ColorBar
from bokeh.plotting import figure

from ddpobs.shared.quantities import counted, duration, steps_text
from ddpobs.shared.words import format_ranks, percent
from ddpobs_server.analysis.slow_ranks.delay_map import DelayMap
from ddpobs_server.figures.canvas import FONT, add_quads, steps_plot
from ddpobs_server.figures.figure_data import FigureData
from ddpobs_server.figures.picture import Picture
from ddpobs_server.figures.selection import RankFilter, Selection
from ddpobs_server.figures.theme import Theme, theme_of

NAME, TITLE = "ranks", "Delay that each rank caused"
PLACE, SELECTION = 3, ("from", "to", "match", "order")
_SLOW = ("straggler", "imbalanced-batches")
"""Findings about slow ranks."""
_MAX_INTERVALS = 300
"""Intervals of steps into which the delays are summed."""
MAX_RANKS = 1024
WINDOW = 64
"""Rows that are seen at first: more would be too thin to be seen."""
_FEW_RANKS = 8
"""Of more ranks those without a delay are left out: they would hide the few that have one."""
_MAX_COLUMNS = 400
"""Columns of the picture."""
ROWS = "rows"
"""Name of the source of the marks of ranks, which the page fills."""
_MIN_SCALE_MS = 0.1
"""The scale ends at least here, so that noise does not look like a delay."""


def make(data: FigureData, selection: Selection) -> Picture:
    """Draw the selected steps of the ranks that match."""
    delays = data.views.delays(selection.first, selection.last, _MAX_INTERVALS)
    hosts = data.hosts()
    compared = set() if delays is None else set(delays.ranks.tolist())
    shown = RankFilter(selection.match, selection.order, hosts)
    slow = {rank for finding in data.findings() if finding["code"] in _SLOW for rank in finding["ranks"]}
    return ranks(delays, shown, sorted(hosts.keys() - compared), slow, theme_of(selection))


def ranks(
    delays: DelayMap | None, shown: RankFilter, absent: Sequence[int], slow: Collection[int], theme: Theme
) -> Picture:
    """Draw the delays of the ranks that match.

    Args:
        delays: Of all ranks; None if there is no step in which all ranks can be compared.
        shown: The rows.
        absent: Ranks of the attempt that are not in `delays`.
        slow: Ranks that a finding calls slow: a delay of another is no more than chance.
        theme: Colours.
    """
    if delays is None:
        return Picture(NAME, TITLE, "The ranks can be compared in no step.")
    rows = shown.rows(delays)
    if not len(rows):
        return Picture(NAME, TITLE, f"No rank or host matches {shown.text!r}.")
    count = len(delays.ranks) + len(absent)
    matching, is_chosen = len(rows), shown.order != "cost" or bool(shown.text.strip())
    late = rows[delays.cost_ns[rows] > 0]
    rows = (rows if is_chosen or matching <= _FEW_RANKS else late)[:MAX_RANKS]
    table = delays.select(rows)
    summary = f"{matching:,} of {count:,} ranks, {steps_text(delays.first[0], delays.last[-1])}. "
    if not len(late):
        nobody = "No rank" if matching == len(delays.ranks) else "None of them"
        summary += f"{nobody} was late by a tenth of a step.{_not_compared(absent)}"
        return Picture(NAME, TITLE, summary, shown={"ranks": table.ranks.tolist()})
    scale_ms = _scale_ms(table)
    plot = _draw(table, scale_ms, theme)
    worst = int(late[np.argmax(delays.cost_ns[late])])
    delay = f"{duration(delays.cost_ns[worst])} a step, late in {percent(delays.late_share[worst])} of the steps."
    if delays.ranks[worst] in slow:
        summary += f"Rank {delays.ranks[worst]} delays the others most: {delay}"
    else:
        summary += f"No finding is about a slow rank. The largest mean delay is rank {delays.ranks[worst]}'s: {delay}"
    if (longest_ms := float(table.delay_ns.max()) / 1e6) > 1.25 * scale_ms:
        summary += f" Longer delays than {scale_ms:.3g} ms have the same colour; the longest is {longest_ms:.3g} ms."
    if len(rows) == len(late) < matching:
        others = matching - len(rows)
        summary += (
            f" The other {counted(others, 'rank')}, which caused no delay, {'is' if others == 1 else 'are'} left out."
        )
    elif len(rows) < matching:
        summary += f" The first {len(rows):,} are drawn."
    summary += _not_compared(absent)
    values = [
        (rank, shown.hosts.get(rank, ""), duration(cost), percent(share, 1))
        for rank, cost, share in zip(table.ranks.tolist(), table.cost_ns, table.late_share, strict=True)
    ]
    facts = {
        "first": int(table.first.min()),
        "last": int(table.last.max()),
        "ranks": table.ranks.tolist(),
        "compared": len(delays.ranks),
        "window": WINDOW,
    }
    return Picture(NAME, TITLE, summary, plot, ("rank", "host", "delay a step", "late in"), values, facts)


def _not_compared(absent: Sequence[int]) -> str:
    return f" No steps to compare of {format_ranks(absent)}." if absent else ""


def _scale_ms(table: DelayMap) -> float:
    """Return the end of the colour scale: a few spikes must not make all other delays pale."""
    delay_ms = table.delay_ns / 1e6
    return max(_MIN_SCALE_MS, float(np.quantile(delay_ms, 0.995)), float(delay_ms.max()) / 4)


def _draw(table: DelayMap, scale_ms: float, theme: Theme) -> figure:
    count, first, end = len(table.ranks), int(table.first.min()), int(table.last.max()) + 1
    height = 100 + 14 * max(7, min(count, WINDOW // 2))
    plot = steps_plot(
        NAME,
        theme,
        (first, end),
        height,
        y_range=Range1d(start=min(count, WINDOW) - 0.5, end=-0.5, bounds=(-0.5, count - 0.5)),
    )
    delay_ms = table.delay_ns / 1e6
    mapper = LinearColorMapper(palette=theme.cost, low=0, high=scale_ms)
    width = (end - first) / min(end - first, _MAX_COLUMNS)
    middles = first + (np.arange(round((end - first) / width)) + 0.5) * width
    bins = np.searchsorted(table.first, middles, side="right") - 1
    cells = delay_ms[bins].T.astype(np.float32)
    rank = np.broadcast_to(table.ranks.astype(np.uint32)[:, None], cells.shape)
    source = ColumnDataSource({"delay": [cells], "rank": [np.ascontiguousarray(rank)]}, name="cells")
    image = plot.image("delay", x=first, y=-0.5, dw=end - first, dh=count, source=source)
    image.glyph.color_mapper = mapper
    tooltips = [("rank", "@rank"), ("step", "$x{0,0}"), ("delay", "@delay{0,0.00} ms a step")]
    plot.add_tools(HoverTool(renderers=[image], tooltips=tooltips))
    bar = ColorBar(color_mapper=mapper, width=10, title="ms a step", formatter=PrintfTickFormatter(format="%.6g"))
    bar.background_fill_color, bar.major_label_text_color, bar.title_text_color = theme.paper, theme.muted, theme.muted
    bar.major_label_text_font = bar.title_text_font = FONT
    plot.add_layout(bar, "right")
    rows = ColumnDataSource({"top": [], "bottom": []}, name=ROWS)
    for color, width in ((theme.paper, 6), (theme.ink, 3)):  # Seen on any colour of the cells.
        add_quads(plot, rows, (first, end, "top", "bottom"), fill_color=None, line_color=color, line_width=width)
    plot.yaxis.ticker = AdaptiveTicker(min_interval=1)
    plot.yaxis.major_label_overrides = {row: str(rank) for row, rank in enumerate(table.ranks.tolist())}
    plot.yaxis.axis_label = "rank"
    plot.grid.grid_line_color = None
    return plot
