"""Joins small chunks into large chunks. A flush every two seconds has few rows, which pack badly and read slowly.

A chunk has up to 4,096 rows, and each row is compacted once. The file of 64 ranks with sixty flushes each takes 6.7
bytes a span after compaction; of 256 ranks with ten flushes each it took 14 before. The retention job rests after each
compaction for as long as it took, because batches wait for the writer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from sqlalchemy import Engine, Row, bindparam, case, func, select

from ddpobs import wire
from ddpobs_server.store import chunks, schema
from ddpobs_server.store.queries import run_queries
from ddpobs_server.store.upkeep import turns
from ddpobs_server.store.upkeep.removal import Guard, unguarded

_ROWS, _CHUNKS = 4096, 256
"""A chunk with fewer rows is small. Small chunks are joined up to this many rows or this many chunks."""


def compact_active(engine: Engine, since_ns: int, guard: Guard = unguarded) -> Iterator[int]:
    """Join the small chunks of the runs with a batch since then; workspaces take turns, urgent runs are first.

    Args:
        engine: Of the database.
        since_ns: Time of the earliest latest batch.
        guard: Contains the errors of a run.

    Yields:
        The decrease in the number of chunks, after each join.
    """
    c = schema.runs.c
    with engine.connect() as connection:
        active = connection.execute(select(c.run_id).where(c.last_seen_ns >= since_ns)).scalars().all()
        urgent = run_queries.urgent(connection, since_ns)
    for run in turns.in_turns(sorted(active, key=lambda run: run not in urgent)):
        with guard(run):
            yield from compact(engine, run)


def compact(engine: Engine, run: str) -> Iterator[int]:
    """Join a run's small chunks, each row once. Chunks that do not make a large chunk yet stay as they are.

    Yields:
        The decrease in the number of chunks, after each join; the caller may pause there.
    """
    c = schema.chunks.c
    small = (c.run_id == run, c.rows < _ROWS)
    # Chunks of a single source are joined with that source's, chunks of many ranks with each other.
    group_key = (c.attempt, c.kind, c.rank, case((c.rank == wire.UNKNOWN, ""), else_=c.source))
    enough = (func.sum(c.rows) >= _ROWS) | (func.count() >= _CHUNKS)
    with engine.connect() as connection:
        query = select(*group_key).where(*small, c.kind.in_(chunks.RECORDS)).group_by(*group_key).having(enough)
        groups = connection.execute(query).all()
    # Read group by group: a run of a thousand ranks has tens of thousands of small chunks.
    for attempt, kind, rank, source in groups:
        in_group = (c.source == source,) if source else (c.attempt == attempt, c.rank == rank)
        query = select(c.attempt, c.kind, c.rank, c.source, c.seq, c.rows).where(*small, c.kind == kind, *in_group)
        with engine.connect() as connection:
            rows = connection.execute(query.order_by(c.first_step, c.source, c.seq)).all()
        for part in _parts(rows):
            yield _join(engine, run, part)


def _parts(small: Iterable[Row[*tuple[Any, ...]]]) -> Iterator[Sequence[Row[*tuple[Any, ...]]]]:
    """Groups of chunks that each make a large chunk."""
    part: list[Row[*tuple[Any, ...]]] = []
    for chunk in small:
        part.append(chunk)
        if sum(chunk.rows for chunk in part) >= _ROWS or len(part) == _CHUNKS:
            yield part
            part = []


def _join(engine: Engine, run: str, part: Sequence[Row[*tuple[Any, ...]]]) -> int:
    """Replace several chunks by a single chunk, under the last chunk's key; 0 if some of them are gone."""
    payload_rows = _read(engine, run, part)
    if payload_rows is None:
        return 0
    kind, rank = part[0].kind, part[0].rank
    payload, step = _joined(kind, rank, [row.payload for row in payload_rows])
    key = (run, part[-1].source, part[-1].seq)
    joined = chunks.row(
        key, attempt=part[0].attempt, kind=kind, rank=rank, ends=chunks.ends(step), rows=len(step), payload=payload
    )
    c, runs = schema.chunks.c, schema.runs.c
    with engine.connect() as connection:
        # Lock the run's own row first, as a deletion of the run does.
        saved_bytes = sum(len(row.payload) for row in payload_rows) - len(payload)
        smaller = schema.runs.update().where(runs.run_id == run)
        connection.execute(smaller.values(chunk_bytes=runs.chunk_bytes - saved_bytes))
        # If another collector has joined chunks under the same key, that chunk has more rows than were read.
        delete = schema.chunks.delete().where(
            c.run_id == run,
            c.source == bindparam("chunk_source"),
            c.kind == kind,
            c.seq == bindparam("chunk_seq"),
            c.rows == bindparam("chunk_rows"),
        )
        keys = [{"chunk_source": row.source, "chunk_seq": row.seq, "chunk_rows": row.rows} for row in payload_rows]
        if connection.execute(delete, keys).rowcount != len(part):
            connection.rollback()  # Another collector was faster, or the run was deleted.
            return 0
        connection.execute(schema.chunks.insert(), joined)
        connection.commit()
    return len(part) - 1


def _read(engine: Engine, run: str, part: Sequence[Row[*tuple[Any, ...]]]) -> list[Any] | None:
    """Rows of the chunks with their payloads, in the same order; None if some of them are gone."""
    c = schema.chunks.c
    sources, seqs = {chunk.source for chunk in part}, {chunk.seq for chunk in part}
    with engine.connect() as connection:
        # A list of pairs would scan the whole run. Two lists may match other chunks too, which are skipped.
        query = select(c.source, c.seq, c.rows, c.payload).where(
            c.run_id == run, c.source.in_(sources), c.kind == part[0].kind, c.seq.in_(seqs)
        )
        rows = {(row.source, row.seq): row for row in connection.execute(query)}
    keys = [(chunk.source, chunk.seq) for chunk in part]
    return [rows[key] for key in keys] if rows.keys() >= set(keys) else None


def _joined(kind: str, rank: int, payloads: Sequence[bytes]) -> tuple[bytes, wire.Ints]:
    """Payload of the rows of all payloads, and their steps."""
    parts = [chunks.unpack(kind, rank, payload) for payload in payloads]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return chunks.pack(columns.pop("rank"), chunks.RECORDS[kind](**columns)), columns["step"]
