"""Steps as a Chrome trace: one process per rank, all on one clock."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.clock_alignment import align

_PHASES_TRACK, _FIRST_BUCKET_TRACK = 0, 1
_BUCKET_BITS = 32


class _StepArgs(msgspec.Struct, gc=False):
    step: int


class _SpanArgs(_StepArgs, gc=False):
    bucket: int
    module: int


class _CompleteEvent(msgspec.Struct, tag_field="ph", tag="X", gc=False):
    """A complete event of the trace format.

    A dict would take several times the memory, and the garbage collector would visit it.
    """

    name: str
    pid: int
    tid: int
    ts: float
    dur: float
    args: _StepArgs


def chrome_trace(
    steps: tuple[wire.Ints, wire.Steps], spans: tuple[wire.Ints, wire.Spans], offsets: dict[int, int]
) -> dict[str, Any]:
    """Phases and bucket communication as complete events, in microseconds since the first step.

    A step records the durations of its phases, not their starts, so they are drawn one after another. Each bucket of
    each module has its own track, because events of one track must not overlap in part. A backward ends when all its
    buckets are done, so buckets of the next backward, of any layout revision, can use the same tracks.

    Args:
        steps: Ranks and columns of shape [steps].
        spans: Ranks and columns of shape [rows].
        offsets: Offset in ns of each rank's clock, as `clock_alignment.offsets_ns` returns it.

    Returns:
        The trace, for msgspec to encode.
    """
    rank, columns = steps
    start_ns = align(rank, offsets, columns.start_ns)
    origin_ns = int(start_ns.min()) if len(start_ns) else 0
    events: list[Any] = []
    for number in np.union1d(rank, spans[0]).tolist():
        events += [
            _name_event("process_name", number, 0, f"rank {number}"),
            _name_event("thread_name", number, _PHASES_TRACK, "phases"),
        ]
    events += _phase_events(rank, columns, start_ns - origin_ns)
    events += _bucket_events(*spans, offsets, origin_ns)
    note = "phases have durations only and are drawn one after another; clocks are aligned by the ends of all-reduces"
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"note": note}}


def _phase_events(rank: wire.Ints, steps: wire.Steps, start_ns: wire.Ints) -> list[_CompleteEvent]:
    duration_ns = np.stack([getattr(steps, f"{phase}_ns") for phase in wire.PHASES], axis=1)
    began_ns = start_ns[:, None] + np.cumsum(duration_ns, axis=1) - duration_ns
    row, phase = cells = np.nonzero(duration_ns)
    columns = (phase, rank[row], steps.step[row], began_ns[cells] / 1e3, duration_ns[cells] / 1e3)
    return [
        _CompleteEvent(wire.PHASES[index], pid, _PHASES_TRACK, began, duration, _StepArgs(step))
        for index, pid, step, began, duration in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _bucket_events(rank: wire.Ints, spans: wire.Spans, offsets: dict[int, int], origin_ns: int) -> list[Any]:
    """Return the tracks' names and the events on them."""
    keys, track = np.unique(spans.module << _BUCKET_BITS | spans.bucket, return_inverse=True)
    pairs = [(key >> _BUCKET_BITS, key & (1 << _BUCKET_BITS) - 1) for key in keys.tolist()]
    names = [f"bucket {bucket}" if module == 0 else f"bucket {module}.{bucket}" for module, bucket in pairs]
    tracks = np.unique(np.stack([rank, track]), axis=1).T.tolist()
    name_events = [_name_event("thread_name", pid, _FIRST_BUCKET_TRACK + index, names[index]) for pid, index in tracks]
    launched_ns = align(rank, offsets, spans.launched_ns) - origin_ns
    duration_ns = spans.done_ns - spans.launched_ns
    columns = (track, rank, spans.step, spans.bucket, spans.module, launched_ns / 1e3, duration_ns / 1e3)
    return name_events + [
        _CompleteEvent(
            names[index], pid, _FIRST_BUCKET_TRACK + index, launched, duration, _SpanArgs(step, bucket, module)
        )
        for index, pid, step, bucket, module, launched, duration in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]


def _name_event(kind: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}
