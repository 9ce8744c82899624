"""Columns packed into chunks and unpacked again. Only this module depends on the form of a payload.

Spans are kept as the rank packed them, a chunk per batch. Steps and other communication of a transaction's batches
share a chunk, with a column of ranks, so that a diagnosis of a thousand ranks reads few chunks. Columns that other
columns predict are left out, such as a step's end.
"""

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


def ends(step: wire.Ints) -> tuple[int, int]:
    """First and last of the steps, which are in any order."""
    return int(step.min()), int(step.max())


def row(
    key: tuple[str, str, int], *, attempt: str, kind: str, rank: int, ends: tuple[int, int], rows: int, payload: bytes
) -> dict[str, Any]:
    """The chunk's row in `schema.chunks`, under a batch's run, source and sequence number."""
    run, source, seq = key
    return {
        "run_id": run,
        "source": source,
        "kind": kind,
        "seq": seq,
        "first_step": ends[0],
        "last_step": ends[1],
        "rows": rows,
        "payload": payload,
        "attempt": attempt,
        "rank": rank,
    }
