"""Steps as a Chrome trace: one process per rank, all on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.communication.transfers import bucket_sizes, transfers
from ddpobs_server.analysis.steps.clock_alignment import align, collectives_of
from ddpobs_server.analysis.trace.buckets import BucketTracks
from ddpobs_server.analysis.trace.events import (
    ALL_RANKS,
    PHASES_TRACK,
    STEPS_TRACK,
    Slice,
    StepArgs,
    WholeStepArgs,
    name_process,
    name_track,
)
from ddpobs_server.analysis.trace.waits import Waits, changes

EVENTS = {"steps": 1 + len(wire.PHASES) + 2, "spans": 4}
"""Maximum number of events of a row of each kind, without counters.

A step has an arrow, a span two parts and gradients.
"""


def chrome_trace(
    steps: tuple[wire.Ints, wire.Steps],
    spans: tuple[wire.Ints, wire.Spans],
    offsets: dict[int, int],
    layouts: Sequence[wire.Layout] = (),
    wall_offset_ns: int | None = None,
) -> dict[str, Any]:
    """Steps, phases, buckets and waiting, in microseconds since the first step.

    A step records the durations of its phases, not their starts, so they are drawn one after another.

    Args:
        steps: Ranks and columns of shape [steps].
        spans: Ranks and columns of shape [rows].
        offsets: Offset in ns of each rank's clock, as `clock_alignment.offsets_ns` returns it.
        layouts: The buckets of each module. Without their sizes, waiting and moving are not told apart.
        wall_offset_ns: Unix time minus the lowest rank's clock; None if unknown.

    Returns:
        The trace, for msgspec to encode.
    """
    rank, columns = steps
    start_ns = align(rank, offsets, columns.start_ns)
    origin_ns = int(start_ns.min()) if len(start_ns) else 0
    began = _times_of_day(start_ns, wall_offset_ns)
    tracks = BucketTracks(spans, offsets, origin_ns, layouts)
    events: list[Any] = []
    for number in np.union1d(rank, spans[0]).tolist():
        events += [
            name_process(number, f"rank {number}"),
            name_track(number, STEPS_TRACK, "steps"),
            name_track(number, PHASES_TRACK, "phases"),
        ]
    start_ns = start_ns - origin_ns
    end_ns = start_ns + columns.end_ns - columns.start_ns
    counters = changes(("ranks", "in a step"), start_ns, end_ns, np.ones(len(rank)))
    events += tracks.names() + _step_slices(rank, columns, start_ns, began) + _phase_slices(rank, columns, start_ns)
    events += tracks.gradients() + tracks.reductions()
    reduced = transfers(spans, collectives_of(steps, spans[0], spans[1].step), bucket_sizes(list(layouts)))
    if len(reduced):
        waits = Waits.of(tracks, reduced)
        events += waits.slices() + waits.arrows()
        counters += waits.counters()
    if counters:
        events += [name_process(ALL_RANKS, "all ranks"), *counters]
    note = "phases have durations only and are drawn one after another; clocks are aligned by the ends of all-reduces"
    other = {"note": note} | ({"began": began[int(start_ns.argmin())]} if any(began) else {})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _times_of_day(start_ns: wire.Ints, wall_offset_ns: int | None) -> list[str]:
    """Return when each step began, in UTC; empty texts if the offset is unknown."""
    if wall_offset_ns is None:
        return [""] * len(start_ns)
    times = (start_ns + wall_offset_ns).astype("datetime64[ns]")
    texts: list[str] = np.datetime_as_string(times, unit="us", timezone="UTC").tolist()
    return texts


def _step_slices(rank: wire.Ints, steps: wire.Steps, start_ns: wire.Ints, began: list[str]) -> list[Slice]:
    columns = (rank, steps.step, start_ns / 1e3, (steps.end_ns - steps.start_ns) / 1e3)
    return [
        Slice(f"step {step}", pid, STEPS_TRACK, start, duration, WholeStepArgs(step, time))
        for pid, step, start, duration, time in zip(*(column.tolist() for column in columns), began, strict=True)
    ]


def _phase_slices(rank: wire.Ints, steps: wire.Steps, start_ns: wire.Ints) -> list[Slice]:
    duration_ns = np.stack([getattr(steps, f"{phase}_ns") for phase in wire.PHASES], axis=1)
    began_ns = start_ns[:, None] + np.cumsum(duration_ns, axis=1) - duration_ns
    row, phase = cells = np.nonzero(duration_ns)
    columns = (phase, rank[row], steps.step[row], began_ns[cells] / 1e3, duration_ns[cells] / 1e3)
    return [
        Slice(wire.PHASES[index], pid, PHASES_TRACK, began, duration, StepArgs(step))
        for index, pid, step, began, duration in zip(*(column.tolist() for column in columns), strict=True)
    ]
