"""One step of all ranks on one clock: phases, and each bucket's or unit's compute, waiting and moving."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from bokeh.models import (
    BasicTicker,
    BoxZoomTool,
    ColumnDataSource,
    FixedTicker,
    PanTool,
    PrintfTickFormatter,
    Range1d,
    ResetTool,
    WheelZoomTool,
)
from bokeh.models.annotations import Arrow, NormalHead
from bokeh.plotting import figure

from ddpobs import wire
from ddpobs.shared.quantities import duration, size_text
from ddpobs.shared.words import bucket_name, format_ranks
from ddpobs_server.analysis.steps.step_timeline import BucketSpans
from ddpobs_server.analysis.steps.waiting import STEP_PARTS
from ddpobs_server.figures.canvas import add_hover, add_legend, add_quads, base_plot
from ddpobs_server.figures.figure_data import Buckets, FigureData, Key
from ddpobs_server.figures.picture import Picture
from ddpobs_server.figures.selection import RankFilter, Selection
from ddpobs_server.figures.theme import (
    COMPUTE,
    HATCHES,
    MOVING,
    PART_COLORS,
    PART_TITLES,
    WAITING_STYLE,
    Theme,
    theme_of,
)
from ddpobs_server.reports.views import StepTimeline

NAME, TITLE = "step", "One step"
PLACE, SELECTION = 4, ("from", "to", "rank", "step", "bucket", "match")
_MAX_SPANS, _MAX_RANKS, _MAX_ARROWS = 8000, 64, 200
_MIN_STEP_SHARE, _MIN_LONGEST_SHARE = 0.02, 0.25
"""The shortest wait that has an arrow: as a share of the step, and of the step's longest wait."""
_SHORTEST_MS = 1e-6
"""Shortest axis: a client may report a step that takes no time."""
_MIN_WAIT_NS = 1_000
"""A shorter wait is below the noise of the clocks' alignment."""
_NARROW_COLUMNS = 3
"""Columns of the legend of a picture that has room for a few times below its axis."""
ARROWS = "arrows"
"""Name of the arrows' source."""
_LANES = {"phase": (0.05, 0.3), "compute": (0.35, 0.6), "comm": (0.65, 0.9)}
"""Lanes of a rank's row, from its top."""
_FEW_RANKS = 16
"""Ranks whose rows are high enough for a thick outline."""
_SMALL_SHARE = 0.2
"""A bucket that takes a smaller part of the step is drawn with as much time before and after it."""
Bools = npt.NDArray[np.bool_]
Rows = tuple[dict[int, int], int]
"""Row of each drawn rank, and the time at the left end of the axis."""
_SIDES = ("left", "right", "top", "bottom")


def make(data: FigureData, selection: Selection) -> Picture:
    """Draw the selected step, or one of the selected steps, with the selected rank on top."""
    timeline = data.views.timeline(selection.step, selection.first, selection.last)
    hosts = data.hosts()
    shown = RankFilter(selection.match, "rank", hosts)
    known = [rank for rank in dict.fromkeys([*timeline.by_own_time, *sorted(hosts)]) if shown.includes(rank)]
    if selection.rank in known:
        known = [selection.rank, *(rank for rank in known if rank != selection.rank)]
    return step(timeline, known, data.buckets(), theme_of(selection), selection.bucket)


def step(timeline: StepTimeline, ranks: list[int], buckets: Buckets, theme: Theme, bucket: str = "") -> Picture:
    """Draw the step of some ranks.

    Args:
        timeline: The step of all ranks.
        ranks: The ranks in order from the top; those without data are left out.
        buckets: Facts of the buckets.
        theme: Colours.
        bucket: Name of the bucket that is outlined; empty for none.
    """
    present = set(timeline.phases.rank.tolist()) | set(timeline.spans.rank.tolist())
    if not present:
        return Picture(NAME, TITLE, f"No data of step {timeline.step:,} is stored.", shown={"step": timeline.step})
    matching = [rank for rank in ranks if rank in present]
    a_rank = max(1, len(timeline.spans.rank) // max(1, len(set(timeline.spans.rank.tolist()))))
    drawn = matching[: max(2, min(_MAX_RANKS, _MAX_SPANS // a_rank))]
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
    end = max(
        _draw_phases(plot, timeline, rows_of, theme), _draw_spans(plot, timeline, rows_of, buckets, theme), _SHORTEST_MS
    )
    plot.x_range.start, plot.x_range.end = -0.01 * end, 1.01 * end  # type: ignore[attr-defined]
    plot.x_range.bounds = (-0.1 * end, 1.1 * end)  # type: ignore[attr-defined]
    _outline(plot, timeline.spans, rows_of, bucket, theme)
    _draw_arrows(plot, timeline.spans, rows_of, end, theme)
    add_legend(plot, theme)
    which = " (the slowest first)" if len(drawn) < len(matching) else ""
    summary = f"Step {timeline.step:,}: {len(drawn):,} of {len(present):,} ranks{which}, all on one clock."
    late_rank = timeline.by_own_time[0] if timeline.by_own_time else None
    if late_rank is not None:
        delay = f"was last, {duration(timeline.delay_ns)} after the others' median."
        summary += f" Rank {late_rank} {delay}" if timeline.delay_ns >= _MIN_WAIT_NS else " No rank was late."
    summary += _longest_wait(timeline.spans, bucket, buckets)
    summary += _reason(timeline)
    absent = sorted(set(ranks) - present)
    if absent:
        summary += f" No data of {format_ranks(absent)}."
    rows = [(rank, *(duration(phase_ns) for phase_ns in _phase_sums(timeline, rank))) for rank in drawn]
    facts = {"step": timeline.step, "ranks": drawn, "late_rank": late_rank}
    return Picture(NAME, TITLE, summary, plot, ("rank", *(PART_TITLES[part] for part in STEP_PARTS)), rows, facts)


def _starts(timeline: StepTimeline) -> list[tuple[wire.Ints, wire.Ints]]:
    return [(timeline.phases.rank, timeline.phases.began_ns), (timeline.spans.rank, timeline.spans.computing_ns)]


def _phase_sums(timeline: StepTimeline, rank: int) -> list[int]:
    own = timeline.phases.rank == rank
    durations = (timeline.phases.ended_ns - timeline.phases.began_ns)[own]
    return np.bincount(timeline.phases.phase[own], durations, len(STEP_PARTS)).astype(np.int64).tolist()  # type: ignore[no-any-return]


def _plot(drawn: list[int], theme: Theme) -> figure:
    count = len(drawn)
    plot = base_plot(
        NAME,
        theme,
        110 + min(44, max(18, 900 // count)) * count,
        x_range=Range1d(start=0, end=1),
        y_range=Range1d(start=count, end=0, bounds=(0, count)),
    )
    plot.xaxis.formatter = PrintfTickFormatter(format="%.6g ms")
    plot.add_tools(
        PanTool(dimensions="width"), WheelZoomTool(dimensions="width"), BoxZoomTool(dimensions="width"), ResetTool()
    )
    plot.toolbar.active_drag = None
    if theme.legend_columns <= _NARROW_COLUMNS:
        plot.xaxis.ticker = BasicTicker(desired_num_ticks=3)
    plot.yaxis.ticker = FixedTicker(ticks=[index + 0.5 for index in range(count)])
    plot.yaxis.major_label_overrides = {index + 0.5: f"rank {rank}" for index, rank in enumerate(drawn)}
    plot.ygrid.ticker = FixedTicker(ticks=list(range(count + 1)))
    return plot


def _draw_phases(plot: figure, timeline: StepTimeline, rows_of: Rows, theme: Theme) -> float:
    phases, (row, origin) = timeline.phases, rows_of
    end, glyphs = 0.0, []
    for index, phase in enumerate(STEP_PARTS):
        rows = np.flatnonzero(np.isin(phases.rank, list(row)) & (phases.phase == index))
        if not len(rows):  # Its entry in the legend would have no colour.
            continue
        began, ended = (phases.began_ns[rows] - origin) / 1e6, (phases.ended_ns[rows] - origin) / 1e6
        times = {"left": began, "right": ended, "ms": ended - began, "phase": [PART_TITLES[phase]] * len(rows)}
        source = ColumnDataSource(_lane(phases.rank[rows], row, "phase") | times)
        style = {"fill_color": PART_COLORS[phase], "legend_label": PART_TITLES[phase], **HATCHES.get(phase, {})}
        glyphs.append(add_quads(plot, source, _SIDES, line_color=theme.paper, line_width=0.5, **style))
        end = max(end, float(ended.max(initial=0.0)))
    add_hover(plot, glyphs, ("rank", "@rank"), ("phase", "@phase, @ms{0,0.000} ms"))
    return end


def _draw_spans(plot: figure, timeline: StepTimeline, rows_of: Rows, buckets: Buckets, theme: Theme) -> float:
    spans, (row, origin) = timeline.spans, rows_of
    rows = np.flatnonzero(np.isin(spans.rank, list(row)))
    if not len(rows):
        return 0.0
    keys = _keys(spans, rows)
    sizes = list(map(buckets.size_bytes, keys))
    late_ranks, waits = spans.rank[spans.late_rows()[rows]].tolist(), spans.waiting_ns[rows] >= _MIN_WAIT_NS
    late = [f" for rank {rank}" if is_wait else "" for rank, is_wait in zip(late_ranks, waits.tolist(), strict=True)]
    shared: dict[str, Any] = {
        "bucket": [bucket_name(module, bucket) for module, _, bucket in keys],
        "title": list(map(buckets.title, keys)),
        "module": spans.module[rows],
        "number": spans.bucket[rows],
        "size": [size_text(size) if size else "unknown size" for size in sizes],
        "parameters": list(map(buckets.parameters, keys)),
        "late": late,
        **{f"{name}_ms": (end - begin)[rows] / 1e6 for name, begin, end in _parts(timeline)},
    }
    tooltips = [
        ("rank", "@rank"),
        (buckets.parts.noun, "@title, @size"),
        ("parameters", "@parameters"),
        ("compute", "@compute_ms{0,0.000} ms"),
        ("queued", "@queued_ms{0,0.000} ms"),
        ("waiting", "@waiting_ms{0,0.000} ms@late"),
        ("moving", "@moving_ms{0,0.000} ms"),
    ]
    styles: dict[str, dict[str, Any]] = {
        "compute": {"fill_color": COMPUTE, "legend_label": "gradient computation"},
        "waiting": WAITING_STYLE | {"legend_label": PART_TITLES["waiting"]},
        "moving": {"fill_color": MOVING, "legend_label": PART_TITLES["exposed_comm"]},
    }
    glyphs = []
    for name, begin, end in _parts(timeline):
        if name not in styles or not (end > begin)[rows].any():  # Else its entry in the legend would have no colour.
            continue
        lane = _lane(spans.rank[rows], row, "compute" if name == "compute" else "comm")
        times = {"left": (begin[rows] - origin) / 1e6, "right": (end[rows] - origin) / 1e6}
        source = ColumnDataSource(shared | lane | times, name=name)
        glyphs.append(add_quads(plot, source, _SIDES, line_color=theme.paper, line_width=0.5, **styles[name]))
    add_hover(plot, glyphs, *tooltips)
    return float((spans.done_ns[rows] - origin).max()) / 1e6


def _draw_arrows(plot: figure, spans: BucketSpans, rows_of: Rows, end_ms: float, theme: Theme) -> None:
    """Draw an arrow from the rank that arrived last to each rank that waited for it, where its wait ends."""
    (row, origin), late, waiting_ns = rows_of, spans.late_rows(), spans.waiting_ns
    least_ns = max(end_ms * 1e6 * _MIN_STEP_SHARE, float(waiting_ns.max(initial=0)) * _MIN_LONGEST_SHARE)
    is_drawn = np.isin(spans.rank, list(row)) & np.isin(spans.rank[late], list(row))
    waits = np.flatnonzero(is_drawn & (waiting_ns >= max(_MIN_WAIT_NS, least_ns)))
    waits = waits[np.argsort(-waiting_ns[waits], kind="stable")[:_MAX_ARROWS]]
    late = late[waits]
    if not len(waits):
        return
    source, target = (_lane(spans.rank[rows], row, "comm") for rows in (late, waits))
    is_below = source["top"] > target["top"]
    data = {
        "late": spans.rank[late],
        "rank": spans.rank[waits],
        "from_ms": (spans.begun_ns[late] - origin) / 1e6,
        "to_ms": (spans.moving_ns[waits] - origin) / 1e6,
        "from": (source["top"] + source["bottom"]) / 2,
        "to": np.where(is_below, target["bottom"], target["top"]),
    }
    head = NormalHead(size=7, fill_color=theme.ink, line_color=theme.ink)
    ends = {"x_start": "from_ms", "y_start": "from", "x_end": "to_ms", "y_end": "to"}
    style: dict[str, Any] = ends | {"line_color": theme.ink, "line_width": 1}
    columns = ColumnDataSource(data, name=ARROWS)
    plot.add_layout(Arrow(source=columns, end=head, **style))
    first = np.unique(late, return_index=True)[1]
    marks = ColumnDataSource({name: np.asarray(data[name])[first] for name in ("late", "from_ms", "from")}, name="late")
    dots = plot.scatter("from_ms", "from", source=marks, size=8, color=theme.ink, line_color=theme.paper)
    dots.level = "overlay"
    add_hover(plot, [dots], ("the last to arrive", "rank @late"))


def _of_bucket(spans: BucketSpans, bucket: str) -> Bools:
    """Return for each span whether it is of this bucket."""
    places = zip(spans.module.tolist(), spans.bucket.tolist(), strict=True)
    return np.array([bucket_name(*place) == bucket for place in places], np.bool_)


def _outline(plot: figure, spans: BucketSpans, rows_of: Rows, bucket: str, theme: Theme) -> None:
    """Outline the bucket on each rank. If it takes a small part of the step, begin with this part."""
    row, origin = rows_of
    rows = np.flatnonzero(_of_bucket(spans, bucket) & np.isin(spans.rank, list(row)))
    if not len(rows):
        return
    edges = {"compute": (spans.computing_ns, spans.ready_ns), "comm": (spans.begun_ns, spans.done_ns)}
    for lane, (begin, end) in edges.items():
        times = {"left": (begin[rows] - origin) / 1e6, "right": (end[rows] - origin) / 1e6}
        source = ColumnDataSource(_lane(spans.rank[rows], row, lane) | times, name=f"chosen {lane}")
        width = 2.5 if len(row) <= _FEW_RANKS else 1.0
        add_quads(plot, source, _SIDES, fill_color=None, line_color=theme.ink, line_width=width)
    left = float((spans.computing_ns[rows] - origin).min()) / 1e6
    right = float((spans.done_ns[rows] - origin).max()) / 1e6
    if right - left < (plot.x_range.end - plot.x_range.start) * _SMALL_SHARE:  # type: ignore[attr-defined]
        margin = right - left
        plot.x_range.start, plot.x_range.end = left - margin, right + margin  # type: ignore[attr-defined]


def _longest_wait(spans: BucketSpans, bucket: str, buckets: Buckets) -> str:
    """Return a sentence about the longest wait, of the selected bucket if it has a span."""
    if not len(spans.rank):
        return ""
    own = _of_bucket(spans, bucket)
    waiting_ns = np.where(own, spans.waiting_ns, -1) if own.any() else spans.waiting_ns
    row = int(np.argmax(waiting_ns))
    place = buckets.phrase(_keys(spans, np.array([row]))[0])
    if waiting_ns[row] < _MIN_WAIT_NS:
        return f" No rank waits at {place}." if own.any() else ""
    late, wait = spans.rank[spans.late_rows()[row]], duration(waiting_ns[row])
    return f" The longest wait is rank {spans.rank[row]}'s at {place}: {wait} for rank {late}."


def _reason(timeline: StepTimeline) -> str:
    """Return a sentence on why this step is shown, unless it was requested or is the only one."""
    first, last = timeline.typical_of or (0, 0)
    return f" It is shown because its delay is the median of steps {first:,} to {last:,}." if last > first else ""


def _keys(spans: BucketSpans, rows: wire.Ints) -> list[Key]:
    columns = (spans.module[rows], spans.revision[rows], spans.bucket[rows])
    return list(zip(*(column.tolist() for column in columns), strict=True))


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
