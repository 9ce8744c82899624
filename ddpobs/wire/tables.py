"""Spans and steps packed as whole tables: spans in transit, and both in the store."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ddpobs.wire import packing
from ddpobs.wire.fields import OWN_PHASES, PHASES, UNKNOWN, Ints
from ddpobs.wire.rows import Spans, Steps

_PREDICTED = (*(f"own_{phase}_ns" for phase in OWN_PHASES), "own_ns", "end_ns")
"""Step columns that earlier columns predict; only the residual is stored."""
_NEVER = -(2**62)
"""Stands for `UNKNOWN` in a column of differences."""


def pack_spans(spans: Spans) -> bytes:
    """Pack spans for transit and for the store, with a bucket's later times relative to its earlier ones.

    The differences vary independently. Absolute times would all be large wherever the earliest differs.
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
    """Reverse `pack_spans`.

    Raises:
        WireError: The bytes are not packed spans, or unpack to more than `limit_bytes`.
    """
    spans = packing.unpack_as(Spans, packed, limit_bytes)
    launched, started, done = spans.launched_ns, spans.started_ns, spans.done_ns
    never = started == _NEVER
    launched += spans.ready_ns
    done += launched
    if never.all():
        started.fill(UNKNOWN)
    else:
        started += launched
        started[never] = UNKNOWN
    return spans


def pack_steps(rank: Ints, steps: Steps) -> bytes:
    """Pack steps of several ranks for the store; predicted columns are replaced by their residuals."""
    columns = steps.by_name()
    residuals = {f"{name}_rest": columns.pop(name) - _predicted(name, columns) for name in reversed(_PREDICTED)}
    return packing.pack({"rank": rank, **columns, **residuals})


def unpack_steps(packed: bytes, limit_bytes: int = packing.UNPACKED_BYTES) -> dict[str, Ints]:
    """Reverse `pack_steps`; the result holds the column `rank` and every column of `Steps`.

    Columns that are absent, since the chunk is older than they are, take their defaults.

    Raises:
        WireError: The bytes are not packed steps, or unpack to more than `limit_bytes`.
    """
    columns = packing.unpack(packed, limit_bytes)
    for name in _PREDICTED:
        if name not in columns:  # The first chunks of this kind had every column.
            columns[name] = columns.pop(f"{name}_rest") + _predicted(name, columns)
    return Steps.with_defaults(columns)


def _predicted(name: str, columns: Mapping[str, Ints]) -> Ints:
    """Predict a column from others: exactly for a consistent sum, mostly for a phase's own part."""
    if name == "end_ns":
        return columns["start_ns"] + sum(columns[f"{phase}_ns"] for phase in PHASES)
    if name == "own_ns":
        return sum((columns[f"own_{phase}_ns"] for phase in OWN_PHASES), np.zeros_like(columns["step"]))
    return columns[name.removeprefix("own_")]
