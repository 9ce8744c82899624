"""Steps as a Chrome trace: one process a rank, on one clock."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.clock_alignment import aligned

_PHASES_TRACK, _FIRST_BUCKET_TRACK = 0, 1
_BUCKET_BITS = 32


class _OfStep(msgspec.Struct, gc=False):
    step: int


class _OfSpan(_OfStep, gc=False):
    bucket: int
    module: int


class _Complete(msgspec.Struct, tag_field="ph", tag="X", gc=False):
    """A complete event of the format; a dict takes several times the memory, and the collector of garbage its time."""

    name: str
    pid: int
    tid: int
    ts: float
    dur: float
    args: _OfStep


def chrome_trace(
    steps: tuple[wire.Ints, wire.Steps], spans: tuple[wire.Ints, wire.Spans], offsets: dict[int, int]
) -> dict[str, Any]:
    """Phases and bucket communication as complete events, in microseconds since the first step; for msgspec to encode.

    A step tells how long its phases took, not when each began: they are laid one after another. Each bucket of each
    module has a track of its own, because events of one track must not overlap in part. A backward ends when all its
    buckets are done, so that the next one's, of whichever layout, may be on the same tracks.
    """
    rank, columns = steps
    start_ns = aligned(rank, offsets, columns.start_ns)
    origin_ns = int(start_ns.min()) if len(start_ns) else 0
    events: list[Any] = []
    for number in np.union1d(rank, spans[0]).tolist():
        events += [
            _name("process_name", number, 0, f"rank {number}"),
            _name("thread_name", number, _PHASES_TRACK, "phases"),
        ]
    events += _phases(rank, columns, start_ns - origin_ns)
    events += _buckets(*spans, offsets, origin_ns)
    note = "phases have durations only and are laid one after another; clocks are aligned by the ends of all-reduces"
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"note": note}}


def _phases(rank: wire.Ints, steps: wire.Steps, start_ns: wire.Ints) -> list[_Complete]:
    lasted_ns = np.stack([getattr(steps, f"{phase}_ns") for phase in wire.PHASES], axis=1)
    began_ns = start_ns[:, None] + np.cumsum(lasted_ns, axis=1) - lasted_ns
    row, phase = there = np.nonzero(lasted_ns)
    columns = (phase, rank[row], steps.step[row], began_ns[there] / 1e3, lasted_ns[there] / 1e3)
    return [
        _Complete(wire.PHASES[which], pid, _PHASES_TRACK, at, lasted, _OfStep(step))
        for which, pid, step, at, lasted in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _buckets(rank: wire.Ints, spans: wire.Spans, offsets: dict[int, int], origin_ns: int) -> list[Any]:
    """The tracks' names, and the events on them."""
    keys, place = np.unique(spans.module << _BUCKET_BITS | spans.bucket, return_inverse=True)
    of_track = [(key >> _BUCKET_BITS, key & (1 << _BUCKET_BITS) - 1) for key in keys.tolist()]
    names = [f"bucket {bucket}" if module == 0 else f"bucket {module}.{bucket}" for module, bucket in of_track]
    tracks = np.unique(np.stack([rank, place]), axis=1)
    named = [_name("thread_name", pid, _FIRST_BUCKET_TRACK + at, names[at]) for pid, at in tracks.T.tolist()]
    launched_ns = aligned(rank, offsets, spans.launched_ns) - origin_ns
    lasted_ns = spans.done_ns - spans.launched_ns
    columns = (place, rank, spans.step, spans.bucket, spans.module, launched_ns / 1e3, lasted_ns / 1e3)
    return named + [
        _Complete(names[track], pid, _FIRST_BUCKET_TRACK + track, at, lasted, _OfSpan(step, bucket, module))
        for track, pid, step, bucket, module, at, lasted in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _name(kind: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}
