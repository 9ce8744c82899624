"""Steps as a Chrome trace: one process per rank, all on one clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
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
    Moment,
    Slice,
    StepArgs,
    WholeStepArgs,
    name_process,
    name_track,
    rows_of,
)
from ddpobs_server.analysis.trace.waits import Waits, changes

BUCKET_CHANGES = "bucket_caps_"
"""Begin of the kinds of events that `bucket_cap_mb="auto"` sends."""
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
    *,
    changes_of_buckets: Sequence[tuple[int, wire.Event]] = (),
) -> dict[str, Any]:
    """Steps, phases, buckets and waiting, in microseconds since the first step.

    A step records the durations of its phases, not their starts, so they are drawn one after another.

    Args:
        steps: Ranks and columns of shape [steps].
        spans: Ranks and columns of shape [rows].
        offsets: Offset in ns of each rank's clock, as `clock_alignment.offsets_ns` returns it.
        layouts: The buckets of each module. Without their sizes, waiting and moving are not told apart.
        wall_offset_ns: Unix time minus the lowest rank's clock; None if unknown.
        changes_of_buckets: Ranks and events of `bucket_cap_mb="auto"`; those of other steps are left out.

    Returns:
        The trace, for msgspec to encode; its events are an iterator, because those of a large step take gigabytes.
    """
    rank, columns = steps
    start_ns = align(rank, offsets, columns.start_ns)
    origin_ns = int(start_ns.min()) if len(start_ns) else 0
    began = _times_of_day(start_ns, wall_offset_ns)
    start_ns = start_ns - origin_ns
    tracks = BucketTracks(spans, offsets, origin_ns, layouts)
    reduced = transfers(spans, collectives_of(steps, spans[0], spans[1].step), bucket_sizes(list(layouts)))
    waits = Waits.of(tracks, reduced) if len(reduced) else None
    events = chain(
        _process_names(np.union1d(rank, spans[0])),
        tracks.names(),
        _step_slices(rank, columns, start_ns, began),
        _phase_slices(rank, columns, start_ns),
        _moments(changes_of_buckets, columns, offsets, origin_ns),
        tracks.gradients(),
        tracks.reductions(),
        chain(waits.slices(), waits.arrows()) if waits is not None else (),
        _counters(start_ns, start_ns + columns.end_ns - columns.start_ns, waits),
    )
    note = "phases have durations only and are drawn one after another; clocks are aligned by the ends of collectives"
    other = {"note": note} | ({"began": began[int(start_ns.argmin())]} if any(began) else {})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _process_names(ranks: wire.Ints) -> Iterator[dict[str, Any]]:
    for rank in ranks.tolist():
        yield name_process(rank, f"rank {rank}")
        yield name_track(rank, STEPS_TRACK, "steps")
        yield name_track(rank, PHASES_TRACK, "phases")


def _moments(
    events: Sequence[tuple[int, wire.Event]], steps: wire.Steps, offsets: dict[int, int], origin_ns: int
) -> Iterator[Moment]:
    shown = set(steps.step.tolist())
    for rank, event in events:
        if event.step in shown and event.at_ns != wire.UNKNOWN:
            at_us = (event.at_ns + offsets.get(rank, 0) - origin_ns) / 1e3
            yield Moment(event.kind.replace("_", " "), rank, STEPS_TRACK, at_us, dict(event.detail))


def _counters(start_ns: wire.Ints, end_ns: wire.Ints, waits: Waits | None) -> Iterator[dict[str, Any]]:
    """Iterate over the counters of all ranks, after the name of their process."""
    in_steps = changes(("ranks", "in a step"), start_ns, end_ns, np.ones(len(start_ns)))
    for number, event in enumerate(chain(in_steps, waits.counters() if waits is not None else ())):
        if number == 0:
            yield name_process(ALL_RANKS, "all ranks")
        yield event


def _times_of_day(start_ns: wire.Ints, wall_offset_ns: int | None) -> list[str]:
    """Return when each step began, in UTC; empty texts if the offset is unknown."""
    if wall_offset_ns is None:
        return [""] * len(start_ns)
    times = (start_ns + wall_offset_ns).astype("datetime64[ns]")
    texts: list[str] = np.datetime_as_string(times, unit="us", timezone="UTC").tolist()
    return texts


def _step_slices(rank: wire.Ints, steps: wire.Steps, start_ns: wire.Ints, began: list[str]) -> Iterator[Slice]:
    columns = (rank, steps.step, start_ns / 1e3, (steps.end_ns - steps.start_ns) / 1e3)
    for (pid, step, start, duration), time in zip(rows_of(*columns), began, strict=True):
        yield Slice(f"step {step}", pid, STEPS_TRACK, start, duration, WholeStepArgs(step, time))


def _phase_slices(rank: wire.Ints, steps: wire.Steps, start_ns: wire.Ints) -> Iterator[Slice]:
    duration_ns = np.stack([getattr(steps, f"{phase}_ns") for phase in wire.PHASES], axis=1)
    began_ns = start_ns[:, None] + np.cumsum(duration_ns, axis=1) - duration_ns
    row, phase = cells = np.nonzero(duration_ns)
    columns = (phase, rank[row], steps.step[row], began_ns[cells] / 1e3, duration_ns[cells] / 1e3)
    for index, pid, step, began_us, duration_us in rows_of(*columns):
        yield Slice(wire.PHASES[index], pid, PHASES_TRACK, began_us, duration_us, StepArgs(step))
