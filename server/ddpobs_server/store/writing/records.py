"""Writes the records of batches that have a row each: layouts, unused sets, events and fingerprints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec
from sqlalchemy import Connection

from ddpobs import wire
from ddpobs_server.store import endings, schema
from ddpobs_server.store.database.sql import execute_many, insert_many
from ddpobs_server.store.writing import fingerprints, ingest_sql


def write(connection: Connection, batches: Sequence[wire.Batch]) -> Counter[str]:
    """Write these records of the batches in the open transaction.

    Returns:
        Growth of their bodies in bytes, by run.
    """
    layouts, unused, events, samples = (
        list(chain.from_iterable(map(rows_of, batches))) for rows_of in (_layouts, _unused, _events, fingerprints.rows)
    )
    if layouts:
        execute_many(connection, ingest_sql.insert_if_new(connection.dialect.name, schema.layouts), layouts)
    insert_many(connection, schema.unused, unused)
    insert_many(connection, schema.events, events)
    insert_many(connection, schema.fingerprints, samples)
    growth: Counter[str] = Counter()
    for row in chain(layouts, unused, events, samples):
        growth[row["run_id"]] += len(row["body"])
    growth.subtract(fingerprints.prune(connection, samples))
    return growth


def _layouts(batch: wire.Batch) -> Iterator[dict[str, Any]]:
    for layout in batch.layouts:
        key = {"run_id": batch.run, "source": batch.source}
        yield {**key, "module": layout.module, "revision": layout.revision, "body": _json(layout)}


def _unused(batch: wire.Batch) -> Iterator[dict[str, Any]]:
    for position, record in enumerate(batch.unused):
        row = {"module": record.module, "names": len(record.locally), "body": _json(record)}
        yield {**_key(batch, position), **row}


def _events(batch: wire.Batch) -> Iterator[dict[str, Any]]:
    """Rows of events. A report about another source has a kind of its own: a diagnosis reads the first of each kind."""
    for position, event in enumerate(batch.events):
        dead = endings.dead_source(batch, event)
        kind = event.kind if dead is None else f"{event.kind}:{dead}"
        yield {**_key(batch, position), "kind": kind[:128].replace("\0", "\ufffd"), "body": _json(event)}


def _key(batch: wire.Batch, position: int) -> dict[str, Any]:
    return {"run_id": batch.run, "source": batch.source, "seq": batch.seq, "position": position}


def _json(record: msgspec.Struct) -> str:
    return msgspec.json.encode(record).decode()
