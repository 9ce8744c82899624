"""Steps as a Chrome trace: one process a rank, on one clock."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.clocks import aligned

_PHASES_TRACK, _BUCKETS_TRACK = 0, 1


def chrome_trace(
    steps: tuple[wire.Ints, wire.Steps], spans: tuple[wire.Ints, wire.Spans], offsets: dict[int, int]
) -> dict[str, Any]:
    """Phases and bucket communication as complete events, in microseconds since the first step.

    A step tells how long its phases took, not when each began: they are laid one after another.
    """
    step_rank, step = steps
    span_rank, span = spans
    start_ns = aligned(step_rank, offsets, step.start_ns)
    origin_ns = int(start_ns.min()) if len(start_ns) else 0
    events: list[dict[str, Any]] = []
    for rank in np.unique(step_rank).tolist():
        events += [
            _name("process_name", rank, 0, f"rank {rank}"),
            _name("thread_name", rank, _PHASES_TRACK, "phases"),
            _name("thread_name", rank, _BUCKETS_TRACK, "buckets"),
        ]
    phases = [getattr(step, f"{phase}_ns").tolist() for phase in wire.PHASES]
    for rank, number, begin, *lasting in zip(
        step_rank.tolist(), step.step.tolist(), (start_ns - origin_ns).tolist(), *phases, strict=True
    ):
        at = begin
        for phase, lasted in zip(wire.PHASES, lasting, strict=True):
            if lasted:
                events.append(_event(phase, rank, _PHASES_TRACK, at, lasted, {"step": number}))
            at += lasted
    launched, done = aligned(span_rank, offsets, span.launched_ns), aligned(span_rank, offsets, span.done_ns)
    columns = (span_rank, span.step, span.bucket, span.module, launched - origin_ns, done - launched)
    for rank, number, bucket, module, at, lasted in zip(*(column.tolist() for column in columns), strict=True):
        facts = {"step": number, "bucket": bucket, "module": module}
        events.append(_event(f"bucket {bucket}", rank, _BUCKETS_TRACK + bucket, at, lasted, facts))
    note = "phases have durations only and are laid one after another; clocks are aligned by the ends of all-reduces"
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"note": note}}


def _event(  # noqa: PLR0917 - the format's own fields
    name: str, rank: int, track: int, at_ns: int, lasted_ns: int, facts: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "pid": rank,
        "tid": track,
        "ts": at_ns / 1e3,
        "dur": lasted_ns / 1e3,
        "args": facts,
    }


def _name(kind: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}
