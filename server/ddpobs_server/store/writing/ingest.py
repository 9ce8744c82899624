"""Writes batches to the tables, many in a transaction.

The collector that inserts a batch's key stores the batch, so that retries and several collectors store it once.
Aggregates by step window, bucket and rank are updated in the same transaction, and outlive the chunks.

Ingest, compaction, retention and deletion may meet in one run, also from several collectors. Each locks the run's own
row before any row that another may need, so they wait in turn and cannot deadlock.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import add, itemgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zstandard
from sqlalchemy import Connection, Table, case, select, update

from ddpobs import wire
from ddpobs_server.store import chunks, endings, schema
from ddpobs_server.store.database.sql import (
    compiled,
    distinct,
    execute_many,
    execute_one,
    execute_rows,
    insert_many,
    with_rows,
)
from ddpobs_server.store.queries import run_labels
from ddpobs_server.store.sums import bucket_sums, rollups, stored_bins
from ddpobs_server.store.writing import deleted_attempts, ingest_sql, records, sent_once

_MERGED = ("steps", "comms")
"""Kinds of which all batches of a transaction share a chunk."""


class UnstorableBatchError(Exception):
    """A batch that can never be stored; the message has the reason."""


class DeletedRunError(UnstorableBatchError):
    """A batch of an attempt whose run was deleted.

    Attributes:
        run: Key of the run.
        attempt: The attempt.
    """

    def __init__(self, run: str, attempt: str) -> None:
        super().__init__("the run was deleted while this process trained; a new launch may use its name again")
        self.run, self.attempt = run, attempt


class Outcome(enum.Enum):
    """Result of storing a batch."""

    STORED = "stored"
    REPEATED = "repeated"
    CONFLICT = "conflict"


@dataclass(frozen=True)
class Arrival:
    """A validated batch as it arrived; its spans are packed.

    Attributes:
        batch: The batch.
        digest: SHA-256 of the body. It distinguishes a retry from a different batch under the same key.
        size_bytes: Size of the body.
        received_ns: Arrival, wall clock of this collector.
    """

    batch: wire.Batch
    digest: bytes
    size_bytes: int
    received_ns: int

    @property
    def key(self) -> tuple[str, str, int]:
        """Run, source and sequence number."""
        return self.batch.run, self.batch.source, self.batch.seq

    @cached_property
    def extents(self) -> sent_once.Extents:
        """First and last of what is sent once."""
        return sent_once.extents(self.batch, self.step_ends.values())

    @cached_property
    def step_ends(self) -> dict[str, tuple[int, int]]:
        """First and last step of its steps and of its spans, without an entry for none."""
        columns = {"steps": self.batch.steps, "spans": self.batch.spans}
        return {kind: own.ends("step") for kind, own in columns.items() if own is not None and len(own)}


class Joined(NamedTuple):
    """Rows of several batches of an attempt; `batch` has for each row the index of its batch in `batches`."""

    batches: Sequence[wire.Batch]
    record: Any
    batch: wire.Ints


def write(connection: Connection, arrivals: Sequence[Arrival]) -> list[Outcome]:
    """Store batches in the open transaction, except batches that are stored already."""
    claimed = _claim(connection, arrivals)
    fresh: dict[tuple[str, str, int], Arrival] = {}
    outcomes = []
    for arrival in arrivals:
        if arrival.key in claimed and arrival.key not in fresh:
            fresh[arrival.key] = arrival
            outcomes.append(Outcome.STORED)
            continue
        digest = fresh[arrival.key].digest if arrival.key in fresh else _digest(connection, arrival.key)
        outcomes.append(Outcome.REPEATED if digest == arrival.digest else Outcome.CONFLICT)
    stored = list(fresh.values())
    if stored:
        joined = {kind: list(_joined(kind, stored)) for kind in _MERGED}
        rows = _chunks(stored, joined)
        relabelled = _touch_runs(connection, stored, rows)
        _touch_sources(connection, stored)
        relabelled |= {arrival.batch.run for arrival in stored if arrival.batch.hello is not None}
        for run in sorted(relabelled):
            run_labels.write_search_text(connection, run)
        insert_many(connection, schema.chunks, rows)
        growth = records.write(connection, [arrival.batch for arrival in stored])
        endings.mark_dead(connection, [arrival.batch for arrival in stored])
        growth.update(_write_sums(connection, stored, joined["steps"]))
        _count_record_bytes(connection, growth)
    return outcomes


def _claim(connection: Connection, arrivals: Sequence[Arrival]) -> set[tuple[str, str, int]]:
    """Keys of the batches that are new. The transaction that inserts a batch's row stores the batch.

    The rule also holds between collectors on the same database.
    """
    first = {arrival.key: arrival for arrival in reversed(arrivals)}
    rows = [_batch_row(arrival) for _, arrival in sorted(first.items(), key=itemgetter(0))]
    sql, names = compiled(ingest_sql.claim(connection.dialect.name), connection.dialect, tuple(rows[0]))
    values = chain.from_iterable(map(itemgetter(*names), rows))
    claimed = execute_one(connection, with_rows(sql, len(rows)), tuple(values))
    return {(row[0], row[1], row[2]) for row in claimed}


def _batch_row(arrival: Arrival) -> dict[str, Any]:
    return {
        "run_id": arrival.batch.run,
        "source": arrival.batch.source,
        "seq": arrival.batch.seq,
        "digest": arrival.digest,
        "received_ns": arrival.received_ns,
        "size_bytes": arrival.size_bytes,
        **arrival.extents,
    }


def _digest(connection: Connection, key: tuple[str, str, int]) -> bytes:
    c = schema.batches.c
    run, source, seq = key
    query = select(c.digest).where(c.run_id == run, c.source == source, c.seq == seq)
    return bytes(connection.execute(query).scalar_one())


def _touch_runs(connection: Connection, arrivals: Sequence[Arrival], chunks: Sequence[dict[str, Any]]) -> set[str]:
    """Update runs and attempts. Returns the runs with a new latest attempt.

    A run's attempt is the newest to arrive, unless its batch is older and was spooled.
    """
    changed: set[str] = set()
    by_run: dict[str, list[Arrival]] = {}
    for arrival in arrivals:
        by_run.setdefault(arrival.batch.run, []).append(arrival)
    size_bytes = dict.fromkeys(by_run, 0)
    for chunk in chunks:
        size_bytes[chunk["run_id"]] += len(chunk["payload"])
    for run, batches in sorted(by_run.items()):
        _touch_and_lock_run(connection, run, batches, size_bytes[run])
        stored, ordinals = _attempts_of(connection, run)
        latest = stored or batches[0].batch.attempt
        for arrival in batches:
            attempt = arrival.batch.attempt
            if attempt not in ordinals:
                if deleted_attempts.contains(connection, run, attempt):
                    raise DeletedRunError(run, attempt)
                ordinals[attempt] = len(ordinals)
                _add_attempt(connection, arrival, ordinals[attempt])
            if ordinals[attempt] > ordinals[latest] and _takes_over(connection, arrival.batch, latest, batches):
                latest = attempt
        if latest != stored:
            connection.execute(update(schema.runs).where(schema.runs.c.run_id == run).values(attempt=latest))
            changed.add(run)
        if (
            problem := sent_once.problem(connection, run, [(arrival.batch, arrival.extents) for arrival in batches])
        ) is not None:
            raise UnstorableBatchError(problem)
    return changed


def _touch_and_lock_run(connection: Connection, run: str, batches: Sequence[Arrival], size_bytes: int) -> None:
    """Update the run's row, which locks it until the transaction ends, so that collectors number attempts in turn."""
    now = max(arrival.received_ns for arrival in batches)
    row = {
        "run_id": run,
        "attempt": batches[0].batch.attempt,
        "created_ns": now,
        "last_seen_ns": now,
        "commits": len(batches),
        "workspace": run.rpartition("/")[0] or schema.DEFAULT_WORKSPACE,
        "chunk_bytes": size_bytes,
    }
    execute_many(connection, ingest_sql.run_upsert(connection.dialect.name), [row])


def _attempts_of(connection: Connection, run: str) -> tuple[str | None, dict[str, int]]:
    """The run's latest attempt, None if it has no attempt yet, and the ordinals of all attempts."""
    sql, names = ingest_sql.attempts_sql(connection.dialect)
    rows = execute_one(connection, sql, (run,) * len(names))
    return rows[0][2] if rows else None, {attempt: ordinal for attempt, ordinal, _ in rows}


def _add_attempt(connection: Connection, arrival: Arrival, ordinal: int) -> None:
    key = {"run_id": arrival.batch.run, "attempt": arrival.batch.attempt}
    row = {**key, "ordinal": ordinal, "first_seen_ns": arrival.received_ns}
    execute_many(connection, ingest_sql.insert_if_new(connection.dialect.name, schema.attempts), [row])


def _takes_over(connection: Connection, batch: wire.Batch, latest: str, arrivals: Sequence[Arrival]) -> bool:
    """Whether a later attempt's batch is also newer than the latest attempt, and did not wait in a spool.

    Compares wall clocks of the same rank, which is mostly on the same host. If the new host's clock is behind, the
    attempt takes over later by the difference. A clock that was ahead counts as its arrival time.
    """
    c = schema.sources.c
    same_rank = case((c.rank == batch.rank, 0), else_=1)
    wall = ingest_sql.least(connection.dialect.name, c.wall_ns, c.last_seen_ns)
    query = select(wall).where(c.run_id == batch.run, c.attempt == latest).order_by(same_rank, wall.desc())
    wall_ns = connection.execute(query.limit(1)).scalar()
    if wall_ns is None:  # The latest attempt arrived in the same transaction.
        anchors = (arrival.batch.anchor for arrival in arrivals if arrival.batch.attempt == latest)
        wall_ns = max((anchor.wall_ns for anchor in anchors), default=0)
    return batch.anchor.wall_ns >= wall_ns


def _touch_sources(connection: Connection, arrivals: Sequence[Arrival]) -> None:
    """Update sources. A source keeps its attempt, which bounds a run's attempts by its sources, and its rank."""
    key = itemgetter("run_id", "source")
    for rows in distinct(sorted(map(_source_row, arrivals), key=key), key):
        if execute_many(connection, ingest_sql.source_upsert(connection.dialect.name), rows) != len(rows):
            raise UnstorableBatchError("attempt, rank: expected those of this source's earlier batches, got others")


def _source_row(arrival: Arrival) -> dict[str, Any]:
    batch, now = arrival.batch, arrival.received_ns
    _, last_step = arrival.step_ends.get("steps", (0, None))
    ended, ended_ns = endings.end_of(batch)
    stuck_pulse = endings.stuck_pulse(batch)
    return {
        "run_id": batch.run,
        "source": batch.source,
        "attempt": batch.attempt,
        "rank": batch.rank,
        "world_size": batch.world_size,
        "emitted": batch.emitted,
        "dropped": batch.dropped,
        "first_seen_ns": now,
        "last_seen_ns": now,
        "last_step": last_step or 0,
        "last_step_seen_ns": 0 if last_step is None else now,
        "wall_ns": batch.anchor.wall_ns,
        "monotonic_ns": batch.anchor.monotonic_ns,
        "hello": msgspec.json.encode(batch.hello).decode() if batch.hello is not None else None,
        "pulse": msgspec.json.encode(batch.pulse).decode() if batch.pulse is not None else None,
        "account": msgspec.json.encode(batch.account).decode() if batch.account is not None else None,
        "goodbye": any(event.kind == "goodbye" for event in batch.events),
        "ended": ended,
        "ended_ns": ended_ns,
        "stuck_ns": endings.stuck_ns(batch),
        "stuck_pulse": msgspec.json.encode(stuck_pulse).decode() if stuck_pulse is not None else None,
    }


def _joined(kind: str, arrivals: Sequence[Arrival]) -> Iterator[Joined]:
    by_attempt: dict[tuple[str, str], list[wire.Batch]] = {}
    for arrival in arrivals:
        record = getattr(arrival.batch, kind)
        if record is not None and len(record):
            by_attempt.setdefault((arrival.batch.run, arrival.batch.attempt), []).append(arrival.batch)
    for _, batches in sorted(by_attempt.items(), key=itemgetter(0)):
        yield Joined(batches, *rollups.join([getattr(batch, kind) for batch in batches]))


def _chunks(arrivals: Sequence[Arrival], joined: Mapping[str, Sequence[Joined]]) -> list[dict[str, Any]]:
    rows = []
    for arrival in arrivals:
        batch = arrival.batch
        if batch.spans is not None and len(batch.spans):
            assert batch.packed_spans is not None
            facts = {"rank": batch.rank, "ends": arrival.step_ends["spans"], "rows": len(batch.spans)}
            rows.append(_chunk(batch, kind="spans", payload=batch.packed_spans, **facts))
        for index, readiness in enumerate(batch.readiness):
            payload = zstandard.compress(wire.pack(readiness), 1)
            facts = {"rank": batch.rank, "ends": (readiness.step, readiness.step), "rows": 1}
            rows.append(_chunk(batch, kind=f"readiness-{index}", payload=payload, **facts))
    for kind, groups in joined.items():
        for batches, record, batch_index in groups:
            rank = np.array([batch.rank for batch in batches])[batch_index]
            facts = {"rank": wire.UNKNOWN, "ends": chunks.ends(record.step), "rows": len(record)}
            rows.append(_chunk(batches[0], kind=kind, payload=chunks.pack(rank, record), **facts))
    return rows


def _chunk(batch: wire.Batch, **facts: Any) -> dict[str, Any]:
    return chunks.row((batch.run, batch.source, batch.seq), attempt=batch.attempt, **facts)


def _count_record_bytes(connection: Connection, growth: Mapping[str, int]) -> None:
    """Add to the size of the runs' records. The transaction holds the locks on the runs' rows."""
    c = schema.runs.c
    for run, size_bytes in sorted(growth.items()):
        if size_bytes:
            larger = update(schema.runs).where(c.run_id == run)
            connection.execute(larger.values(record_bytes=c.record_bytes + size_bytes))


def _write_sums(connection: Connection, arrivals: Sequence[Arrival], steps: Sequence[Joined]) -> Counter[str]:
    """Add to the sums. Returns the growth of the packed sums of buckets in bytes, by run."""
    stored_bins.mark_stale(connection, (_steps_of(batch) for group in steps for batch in group.batches))
    _add(connection, schema.rollups, [(g.batches, rollups.step_windows(g.record, g.batch)) for g in steps])
    _add(connection, schema.step_histogram, [(g.batches, rollups.step_durations(g.record, g.batch)) for g in steps])
    with_peers = [arrival.batch for arrival in arrivals if arrival.batch.peers]
    _add(connection, schema.peer_totals, [(with_peers, rollups.peer_sums([batch.peers for batch in with_peers]))])
    by_bucket: dict[bucket_sums.Key, bucket_sums.Table] = {}
    for batches, spans, batch in _joined("spans", arrivals):
        sums = rollups.sum_buckets(spans, batch, [batch.steps for batch in batches])
        for (index, module, revision), table in sums.items():
            key = batches[index].run, batches[index].source, module, revision
            by_bucket[key] = bucket_sums.add_tables(by_bucket[key], table) if key in by_bucket else table
    return bucket_sums.add(connection, by_bucket)


def _steps_of(batch: wire.Batch) -> tuple[str, str, wire.Ints]:
    """Run, attempt and steps of a batch with steps."""
    assert batch.steps is not None
    return batch.run, batch.attempt, batch.steps.step


def _add(connection: Connection, table: Table, parts: Iterable[tuple[Sequence[wire.Batch], rollups.Sums]]) -> None:
    """Add sums to the table's rows with the same keys, in key order, so that two collectors never deadlock.

    Args:
        connection: In a transaction.
        table: Table of sums.
        parts: Sums, and the batches that they belong to.
    """
    names = tuple(table.columns.keys())  # The primary key's columns are first.
    width = len(table.primary_key)
    totals: dict[tuple[Any, ...], tuple[int, ...]] = {}
    for batches, sums in parts:
        row_batches = [batches[index] for index in sums["batch"]]
        keys = {"run_id": [batch.run for batch in row_batches], "source": [batch.source for batch in row_batches]}
        columns = {**sums, **keys}
        for row in zip(*(columns[name] for name in names), strict=True):
            key, values = row[:width], row[width:]
            totals[key] = tuple(map(add, totals[key], values)) if key in totals else values
    if totals:
        sql, _ = compiled(ingest_sql.sum_upsert(connection.dialect.name, table), connection.dialect, names)
        execute_rows(connection, sql, [(*key, *values) for key, values in sorted(totals.items())])
