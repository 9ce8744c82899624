"""How columns become a chunk, and come back out of it: the only place that knows what a payload holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import zstandard

from ddpobs import wire
from ddpobs.wire import packing
from ddpobs.wire.columns import Columns

RECORDS: dict[str, Any] = {"spans": wire.Spans, "steps": wire.Steps, "comms": wire.Comms}
"""By kind of chunk, what its rows are."""
_OLD_FORM = "-1"
"""Ends the kind of chunks that the first schema wrote."""
_ANY_SIZE = 2**62
"""Of a chunk, unpacked: what it holds was within the limits when it came, and these are the operator's."""


def kinds(kind: str) -> list[str]:
    """What chunks of a kind are called, earlier ones too."""
    return [kind, f"{kind}{_OLD_FORM}"]


def pack(rank: wire.Ints, record: Columns) -> bytes:
    """The payload of these rows; spans are all of one rank, which is not in it."""
    if isinstance(record, wire.Spans):
        return wire.pack_spans(record)
    if isinstance(record, wire.Steps):
        return wire.pack_steps(rank, record)
    return packing.pack({"rank": rank, **record.by_name()})


def unpack(kind: str, rank: int, payload: bytes) -> dict[str, wire.Ints]:
    """A chunk's columns by name, that of the ranks among them.

    Args:
        kind: The chunk's.
        rank: All rows', `wire.UNKNOWN` where the payload has a column of them.
        payload: As `pack` or an earlier version made it.
    """
    if kind == "steps":
        return wire.unpack_steps(payload, _ANY_SIZE)
    if kind == "comms":
        return wire.Comms.with_defaults(packing.unpack(payload, _ANY_SIZE))
    if kind == "spans":
        found: Any = wire.unpack_spans(payload, _ANY_SIZE)
    else:
        found = wire.unpack(zstandard.decompress(payload), RECORDS[kind.removesuffix(_OLD_FORM)])
    return {"rank": np.full(len(found), rank, np.int64), **found.by_name()}


def row(
    key: tuple[str, str, int], *, attempt: str, kind: str, rank: int, step: wire.Ints, payload: bytes
) -> dict[str, Any]:
    """The chunk's row in `schema.chunks`, under a batch's run, source and sequence number."""
    run, source, seq = key
    return {
        "run_id": run,
        "source": source,
        "kind": kind,
        "seq": seq,
        "first_step": int(step.min()),
        "last_step": int(step.max()),
        "rows": len(step),
        "payload": payload,
        "attempt": attempt,
        "rank": rank,
    }
