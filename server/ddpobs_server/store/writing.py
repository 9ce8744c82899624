"""Batches into tables, many in one transaction."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import zstandard
from sqlalchemy import Connection, Table, func, select
from sqlalchemy.dialects import postgresql, sqlite

from ddpobs import wire
from ddpobs_server.store import rollups, schema

_CHUNK_KINDS = ("steps", "spans", "comms")


class Outcome(enum.Enum):
    """What became of a batch."""

    STORED = "stored"
    REPEATED = "repeated"
    CONFLICT = "conflict"


@dataclass(frozen=True)
class Arrival:
    """A checked batch as it arrived.

    Attributes:
        digest: Of the body, to tell a retry from another batch under the same key.
        received_ns: Wall clock of this collector.
    """

    batch: wire.Batch
    digest: bytes
    size_bytes: int
    received_ns: int


def write(connection: Connection, arrival: Arrival) -> Outcome:
    """Store one batch in the open transaction, or find that it is there already."""
    batch = arrival.batch
    key = {"run_id": batch.run, "source": batch.source}
    known = connection.execute(
        select(schema.batches.c.digest).where(
            schema.batches.c.run_id == batch.run,
            schema.batches.c.source == batch.source,
            schema.batches.c.seq == batch.seq,
        )
    ).scalar()
    if known is not None:
        return Outcome.REPEATED if bytes(known) == arrival.digest else Outcome.CONFLICT
    _insert(
        connection,
        schema.batches,
        [
            {
                **key,
                "seq": batch.seq,
                "digest": arrival.digest,
                "received_ns": arrival.received_ns,
                "size_bytes": arrival.size_bytes,
            }
        ],
    )
    _touch_run(connection, arrival)
    _touch_source(connection, arrival)
    _write_records(connection, batch, key)
    _write_rollups(connection, batch, key)
    return Outcome.STORED


def _touch_run(connection: Connection, arrival: Arrival) -> None:
    batch, now = arrival.batch, arrival.received_ns
    seen = select(schema.attempts.c.ordinal).where(
        schema.attempts.c.run_id == batch.run, schema.attempts.c.attempt == batch.attempt
    )
    new_attempt = connection.execute(seen).scalar() is None
    if new_attempt:
        count = connection.execute(
            select(func.count()).select_from(schema.attempts).where(schema.attempts.c.run_id == batch.run)
        ).scalar_one()
        row = {"run_id": batch.run, "attempt": batch.attempt, "ordinal": count, "first_seen_ns": now}
        _insert(connection, schema.attempts, [row])
    row = {"run_id": batch.run, "attempt": batch.attempt, "created_ns": now, "last_seen_ns": now, "commits": 1}
    statement = _dialect_insert(connection, schema.runs).values(row)
    changes: dict[str, Any] = {"last_seen_ns": now, "commits": schema.runs.c.commits + 1}
    if new_attempt:
        changes["attempt"] = batch.attempt
    connection.execute(statement.on_conflict_do_update(index_elements=["run_id"], set_=changes))


def _touch_source(connection: Connection, arrival: Arrival) -> None:
    batch, now = arrival.batch, arrival.received_ns
    row: dict[str, Any] = {
        "run_id": batch.run,
        "source": batch.source,
        "attempt": batch.attempt,
        "rank": batch.rank,
        "world_size": batch.world_size,
        "first_seen_ns": now,
        "goodbye": False,
        "last_step_seen_ns": now,
    }
    changes: dict[str, Any] = {
        "last_seen_ns": now,
        "emitted": batch.emitted,
        "dropped": batch.dropped,
        "wall_ns": batch.anchor.wall_ns,
        "monotonic_ns": batch.anchor.monotonic_ns,
    }
    if batch.hello is not None:
        changes["hello"] = msgspec.json.encode(batch.hello).decode()
    if batch.pulse is not None:
        changes["pulse"] = msgspec.json.encode(batch.pulse).decode()
    if batch.steps is not None and len(batch.steps.step):
        changes |= {"last_step": int(batch.steps.step.max()), "last_step_seen_ns": now}
    if any(event.kind == "goodbye" for event in batch.events):
        changes["goodbye"] = True
    statement = _dialect_insert(connection, schema.sources).values(row | changes)
    keep_highest = {
        name: _greatest(connection, schema.sources.c[name], changes[name])
        for name in ("emitted", "dropped", "last_step", "wall_ns", "monotonic_ns")
        if name in changes
    }
    connection.execute(
        statement.on_conflict_do_update(index_elements=["run_id", "source"], set_=changes | keep_highest)
    )


def _write_records(connection: Connection, batch: wire.Batch, key: dict[str, str]) -> None:
    chunks = []
    for kind in _CHUNK_KINDS:
        columns = getattr(batch, kind)
        if columns is not None and len(columns.step):
            chunks.append(_chunk(key, kind, batch.seq, columns, columns.step))
    for kind in ("readiness", "peers"):
        for index, record in enumerate(getattr(batch, kind)):
            step = record.step if kind == "readiness" else record.last_collective
            chunks.append(_chunk(key, f"{kind}-{index}", batch.seq, record, np.array([step])))
    _insert(connection, schema.chunks, chunks)
    for layout in batch.layouts:
        body = msgspec.json.encode(layout).decode()
        row = {**key, "module": layout.module, "revision": layout.revision, "body": body}
        connection.execute(_dialect_insert(connection, schema.layouts).values(row).on_conflict_do_nothing())
    rows = [
        {**key, "seq": batch.seq, "position": position, "body": msgspec.json.encode(record).decode()}
        for position, record in enumerate(batch.unused)
    ]
    _insert(connection, schema.unused, rows)
    rows = [
        {
            **key,
            "seq": batch.seq,
            "position": position,
            "kind": event.kind[:128],
            "body": msgspec.json.encode(event).decode(),
        }
        for position, event in enumerate(batch.events)
    ]
    _insert(connection, schema.events, rows)


def _write_rollups(connection: Connection, batch: wire.Batch, key: dict[str, str]) -> None:
    if batch.steps is not None and len(batch.steps.step):
        _add(connection, schema.rollups, key, rollups.step_windows(batch.steps))
        _add(connection, schema.step_histogram, key, rollups.step_durations(batch.steps))
    if batch.spans is not None and len(batch.spans.step):
        _add(connection, schema.bucket_rollups, key, rollups.bucket_sums(batch.spans))
    _add(connection, schema.peer_totals, key, rollups.peer_sums(batch.peers))


def _chunk(key: dict[str, str], kind: str, seq: int, record: msgspec.Struct, step: wire.Ints) -> dict[str, Any]:
    return {
        **key,
        "kind": kind,
        "seq": seq,
        "first_step": int(step.min()),
        "last_step": int(step.max()),
        "rows": len(step),
        "payload": zstandard.compress(wire.pack(record), 1),
    }


def _add(connection: Connection, table: Table, key: dict[str, str], rows: Iterable[dict[str, Any]]) -> None:
    """Add sums to what the table holds under the same key."""
    keyed = [key | row for row in rows]
    if not keyed:
        return
    statement = _dialect_insert(connection, table)
    sums = {column.name: column + statement.excluded[column.name] for column in table.columns if not column.primary_key}
    keys = [column.name for column in table.primary_key.columns]
    connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=sums), keyed)


def _insert(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    if rows:
        connection.execute(table.insert(), rows)


def _dialect_insert(connection: Connection, table: Table) -> Any:
    return (sqlite if connection.dialect.name == "sqlite" else postgresql).insert(table)


def _greatest(connection: Connection, column: Any, value: int) -> Any:
    return (func.max if connection.dialect.name == "sqlite" else func.greatest)(column, value)


def delete_run(connection: Connection, run: str) -> bool:
    """Remove everything of a run; False where there is none."""
    found = connection.execute(schema.runs.delete().where(schema.runs.c.run_id == run)).rowcount
    for table in schema.metadata.tables.values():
        if table is not schema.runs:
            connection.execute(table.delete().where(table.c.run_id == run))
    return bool(found)


__all__ = ["Arrival", "Outcome", "delete_run", "write"]
