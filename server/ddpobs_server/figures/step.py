"""One step of all ranks on one clock: phases, and each bucket's compute, waiting and moving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from bokeh.models import (
    BoxZoomTool,
    ColumnDataSource,
    FixedTicker,
    PanTool,
    PrintfTickFormatter,
    Range1d,
    ResetTool,
    WheelZoomTool,
)
from bokeh.plotting import figure

from ddpobs import wire
from ddpobs_server.figures.canvas import add_hover, add_legend, add_quads, base_plot
from ddpobs_server.figures.picture import Picture, few_ranks, milliseconds, module_bucket, size_text
from ddpobs_server.figures.theme import COMPUTE, MOVING, PHASE_COLORS, PHASE_TITLES, WAITING_STYLE, Theme
from ddpobs_server.reports.views import StepTimeline

NAME, TITLE = "step", "One step"
_MOST_SPANS, _MOST_RANKS = 8000, 64
"""Most buckets and ranks that are drawn."""
_LANES = {"phase": (0.05, 0.3), "compute": (0.35, 0.6), "comm": (0.65, 0.9)}
"""Lanes of a rank's row, from its top."""
Rows = tuple[dict[int, int], int]
"""Row of each drawn rank, and the time at the left end of the axis."""
_SIDES = ("left", "right", "top", "bottom")
Buckets = Mapping[tuple[int, int, int], tuple[int, str]]
"""Size in bytes and names of parameters, by module, revision and bucket."""


def step(timeline: StepTimeline, ranks: list[int], buckets: Buckets, theme: Theme) -> Picture:
    """Draw the step of some ranks.

    Args:
        timeline: The step of all ranks.
        ranks: The ranks in order from the top; those without data are left out.
        buckets: Facts of the buckets.
        theme: Colours.
    """
    present = set(timeline.phases.rank.tolist()) | set(timeline.spans.rank.tolist())
    if not present:
        return Picture(NAME, TITLE, f"No data of step {timeline.step:,} is stored.", shown={"step": timeline.step})
    matching = [rank for rank in ranks if rank in present]
    a_rank = max(1, len(timeline.spans.rank) // max(1, len(set(timeline.spans.rank.tolist()))))
    drawn = matching[: max(2, min(_MOST_RANKS, _MOST_SPANS // a_rank))]
    if not drawn:
        return Picture(
            NAME, TITLE, f"No matching rank has data of step {timeline.step:,}.", shown={"step": timeline.step}
        )
    drawn = sorted(drawn) if len(drawn) == len(matching) else drawn
    row = {rank: index for index, rank in enumerate(drawn)}
    starts = [times[np.isin(rank, drawn)] for rank, times in _starts(timeline)]
    origin = int(np.concatenate(starts).min())
    plot = _plot(drawn, theme)
    rows_of = row, origin
    end = max(_draw_phases(plot, timeline, rows_of, theme), _draw_spans(plot, timeline, rows_of, buckets, theme))
    plot.x_range.start, plot.x_range.end = -0.01 * end, 1.01 * end  # type: ignore[attr-defined]
    plot.x_range.bounds = (-0.1 * end, 1.1 * end)  # type: ignore[attr-defined]
    add_legend(plot, theme)
    which = " (the slowest first)" if len(drawn) < len(matching) else ""
    summary = f"Step {timeline.step:,}: {len(drawn):,} of {len(present):,} ranks{which}, all on one clock."
    late_rank = timeline.by_own_time[0] if timeline.by_own_time else None
    if late_rank is not None:
        summary += f" Rank {late_rank} was last, {milliseconds(timeline.delay_ns)} after the others' median."
    absent = sorted(set(ranks) - present)
    if absent:
        summary += f" No data of rank {few_ranks(absent)}."
    rows = [(rank, *(milliseconds(phase_ns) for phase_ns in _phase_sums(timeline, rank))) for rank in drawn]
    facts = {"step": timeline.step, "ranks": drawn, "late_rank": late_rank}
    return Picture(NAME, TITLE, summary, plot, ("rank", *PHASE_TITLES.values()), rows, facts)


def _starts(timeline: StepTimeline) -> list[tuple[wire.Ints, wire.Ints]]:
    return [(timeline.phases.rank, timeline.phases.began_ns), (timeline.spans.rank, timeline.spans.computing_ns)]


def _phase_sums(timeline: StepTimeline, rank: int) -> list[int]:
    own = timeline.phases.rank == rank
    durations = (timeline.phases.ended_ns - timeline.phases.began_ns)[own]
    return np.bincount(timeline.phases.phase[own], durations, len(wire.PHASES)).astype(np.int64).tolist()  # type: ignore[no-any-return]


def _plot(drawn: list[int], theme: Theme) -> figure:
    count = len(drawn)
    plot = base_plot(
        NAME,
        theme,
        110 + min(44, max(18, 900 // count)) * count,
        x_range=Range1d(start=0, end=1),
        y_range=Range1d(start=count, end=0, bounds=(0, count)),
    )
    plot.xaxis.formatter = PrintfTickFormatter(format="%g ms")
    plot.add_tools(
        PanTool(dimensions="width"), WheelZoomTool(dimensions="width"), BoxZoomTool(dimensions="width"), ResetTool()
    )
    plot.toolbar.active_drag = None
    plot.yaxis.ticker = FixedTicker(ticks=[index + 0.5 for index in range(count)])
    plot.yaxis.major_label_overrides = {index + 0.5: f"rank {rank}" for index, rank in enumerate(drawn)}
    plot.ygrid.ticker = FixedTicker(ticks=list(range(count + 1)))
    return plot


def _draw_phases(plot: figure, timeline: StepTimeline, rows_of: Rows, theme: Theme) -> float:
    phases, (row, origin) = timeline.phases, rows_of
    end, glyphs = 0.0, []
    for index, phase in enumerate(wire.PHASES):
        rows = np.flatnonzero(np.isin(phases.rank, list(row)) & (phases.phase == index))
        began, ended = (phases.began_ns[rows] - origin) / 1e6, (phases.ended_ns[rows] - origin) / 1e6
        times = {"left": began, "right": ended, "ms": ended - began, "phase": [PHASE_TITLES[phase]] * len(rows)}
        source = ColumnDataSource(_lane(phases.rank[rows], row, "phase") | times)
        style = {"fill_color": PHASE_COLORS[phase], "legend_label": PHASE_TITLES[phase]}
        glyphs.append(add_quads(plot, source, _SIDES, line_color=theme.paper, line_width=0.5, **style))
        end = max(end, float(ended.max(initial=0.0)))
    add_hover(plot, glyphs, ("rank", "@rank"), ("phase", "@phase, @ms{0,0.000} ms"))
    return end


def _draw_spans(plot: figure, timeline: StepTimeline, rows_of: Rows, buckets: Buckets, theme: Theme) -> float:
    spans, (row, origin) = timeline.spans, rows_of
    rows = np.flatnonzero(np.isin(spans.rank, list(row)))
    if not len(rows):
        return 0.0
    keys = list(
        zip(spans.module[rows].tolist(), spans.revision[rows].tolist(), spans.bucket[rows].tolist(), strict=True)
    )
    facts = [buckets.get(key, (0, "")) for key in keys]
    shared: dict[str, Any] = {
        "bucket": [module_bucket(module, bucket) for module, _, bucket in keys],
        "module": spans.module[rows],
        "number": spans.bucket[rows],
        "size": [size_text(size) if size else "unknown size" for size, _ in facts],
        "parameters": [names for _, names in facts],
        **{f"{name}_ms": (end - begin)[rows] / 1e6 for name, begin, end in _parts(timeline)},
    }
    tooltips = [
        ("rank", "@rank"),
        ("bucket", "@bucket, @size"),
        ("parameters", "@parameters"),
        ("compute", "@compute_ms{0,0.000} ms"),
        ("queued", "@queued_ms{0,0.000} ms"),
        ("waiting for the last rank", "@waiting_ms{0,0.000} ms"),
        ("moving", "@moving_ms{0,0.000} ms"),
    ]
    styles: dict[str, dict[str, Any]] = {
        "compute": {"fill_color": COMPUTE, "legend_label": "gradient computation"},
        "waiting": WAITING_STYLE | {"legend_label": "all-reduce: waiting"},
        "moving": {"fill_color": MOVING, "legend_label": "all-reduce: moving"},
    }
    glyphs = []
    for name, begin, end in _parts(timeline):
        if name not in styles:
            continue
        lane = _lane(spans.rank[rows], row, "compute" if name == "compute" else "comm")
        times = {"left": (begin[rows] - origin) / 1e6, "right": (end[rows] - origin) / 1e6}
        source = ColumnDataSource(shared | lane | times, name=name)
        glyphs.append(add_quads(plot, source, _SIDES, line_color=theme.paper, line_width=0.5, **styles[name]))
    add_hover(plot, glyphs, *tooltips)
    return float((spans.done_ns[rows] - origin).max()) / 1e6


def _parts(timeline: StepTimeline) -> list[tuple[str, wire.Ints, wire.Ints]]:
    spans = timeline.spans
    return [
        ("compute", spans.computing_ns, spans.ready_ns),
        ("queued", spans.launched_ns, spans.begun_ns),
        ("waiting", spans.begun_ns, spans.moving_ns),
        ("moving", spans.moving_ns, spans.done_ns),
    ]


def _lane(rank: wire.Ints, row: dict[int, int], name: str) -> dict[str, Any]:
    top, bottom = _LANES[name]
    index = np.array([row[number] for number in rank.tolist()], np.float64)
    return {"rank": rank, "top": index + top, "bottom": index + bottom}
