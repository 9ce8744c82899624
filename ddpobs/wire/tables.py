"""Spans and steps packed as a whole: as spans travel, and as both are kept."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ddpobs.wire import packing
from ddpobs.wire.schema import OWN_PHASES, PHASES, UNKNOWN, Ints, Spans, Steps

_FORETOLD = (*(f"own_{phase}_ns" for phase in OWN_PHASES), "own_ns", "end_ns")
"""Columns of steps that others foretell, each from those before it."""
_NEVER = -(2**62)
"""What stands for `UNKNOWN` in a column of differences."""


def pack_spans(spans: Spans) -> bytes:
    """Spans as they travel and are kept: packed columns, a bucket's later times as what passed since the earlier.

    Each of these varies by itself, and where the earlier one differs they would all be large.
    """
    since_launch = np.where(spans.started_ns == UNKNOWN, _NEVER, spans.started_ns - spans.launched_ns)
    return packing.pack(
        spans.by_name()
        | {
            "launched_ns": spans.launched_ns - spans.ready_ns,
            "started_ns": since_launch,
            "done_ns": spans.done_ns - spans.launched_ns,
        }
    )


def unpack_spans(packed: bytes, limit_bytes: int = packing.UNPACKED_BYTES) -> Spans:
    """What `pack_spans` packed.

    Raises:
        WireError: It is no such thing, or more than `limit_bytes` of it.
    """
    spans = packing.unpack_as(Spans, packed, limit_bytes)
    launched, started, done = spans.launched_ns, spans.started_ns, spans.done_ns
    never = started == _NEVER
    launched += spans.ready_ns
    done += launched
    started += launched
    started[never] = UNKNOWN
    return spans


def pack_steps(rank: Ints, steps: Steps) -> bytes:
    """Steps of several ranks as they are kept: packed columns, without what others foretell."""
    known = steps.by_name()
    rests = {f"{name}_rest": known.pop(name) - _foretold(name, known) for name in reversed(_FORETOLD)}
    return packing.pack({"rank": rank, **known, **rests})


def unpack_steps(packed: bytes, limit_bytes: int = packing.UNPACKED_BYTES) -> dict[str, Ints]:
    """The columns that `pack_steps` packed, `rank` among them.

    Raises:
        WireError: It is no such thing, or more than `limit_bytes` of it.
    """
    found = packing.unpack(packed, limit_bytes)
    for name in _FORETOLD:
        if name not in found:  # The first chunks of this kind had every column.
            found[name] = found.pop(f"{name}_rest") + _foretold(name, found)
    return found


def _foretold(name: str, known: Mapping[str, Ints]) -> Ints:
    """What a column is likely to be: always for sums, mostly for a phase's own part."""
    if name == "end_ns":
        return known["start_ns"] + sum(known[f"{phase}_ns"] for phase in PHASES)
    if name == "own_ns":
        return sum((known[f"own_{phase}_ns"] for phase in OWN_PHASES), np.zeros_like(known["step"]))
    return known[name.removeprefix("own_")]
