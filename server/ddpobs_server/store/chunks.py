"""Columns packed into chunks and unpacked again. Only this module depends on the form of a payload."""

from __future__ import annotations

from typing import Any

import numpy as np
import zstandard

from ddpobs import wire
from ddpobs.wire import packing
from ddpobs.wire.columns import Columns

RECORDS: dict[str, Any] = {"spans": wire.Spans, "steps": wire.Steps, "comms": wire.Comms}
"""Type of a chunk's rows, by kind of chunk."""
_OLD_FORM = "-1"
"""Suffix of the kinds of chunks in the first schema's form."""
_ANY_SIZE = 2**62
"""Size limit for unpacking a chunk. Its content was within the limits on arrival, and the operator sets those."""


def kinds(kind: str) -> list[str]:
    """Names under which chunks of a kind are stored, including the first schema's."""
    return [kind, f"{kind}{_OLD_FORM}"]


def pack(rank: wire.Ints, record: Columns) -> bytes:
    """Payload of some rows. All spans of a chunk belong to the same rank, which is not part of the payload."""
    if isinstance(record, wire.Spans):
        return wire.pack_spans(record)
    if isinstance(record, wire.Steps):
        return wire.pack_steps(rank, record)
    return packing.pack({"rank": rank, **record.by_name()})


def unpack(kind: str, rank: int, payload: bytes) -> dict[str, wire.Ints]:
    """A chunk's columns by name, including the column `rank`.

    Args:
        kind: Kind of the chunk.
        rank: Rank of all rows; `wire.UNKNOWN` if the payload has a column of ranks.
        payload: Written by `pack`, of this version or an earlier version.
    """
    if kind == "steps":
        return wire.unpack_steps(payload, _ANY_SIZE)
    if kind == "comms":
        return wire.Comms.with_defaults(packing.unpack(payload, _ANY_SIZE))
    if kind == "spans":
        record: Any = wire.unpack_spans(payload, _ANY_SIZE)
    else:
        record = wire.unpack(zstandard.decompress(payload), RECORDS[kind.removesuffix(_OLD_FORM)])
    return {"rank": np.full(len(record), rank, np.int64), **record.by_name()}


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
