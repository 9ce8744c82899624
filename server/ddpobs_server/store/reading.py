"""Columns and rows back out of the tables."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np
import zstandard
from sqlalchemy import Connection, Double, Row, Select, case, cast, func, select

from ddpobs import columns as packing
from ddpobs import wire
from ddpobs_server.store import schema
from ddpobs_server.store.rows import Attempt, BucketRollup, PeerTotal, Rollup, Run, Source

_OLD_FORM = "-1"
"""Ends the kind of chunks that the first schema wrote."""
_Columns = TypeVar("_Columns", wire.Steps, wire.Spans, wire.Comms)


def columns(
    connection: Connection,
    kind: tuple[str, type[_Columns]],
    run: str,
    attempt: str,
    *,
    rank: int | None,
    first: int | None,
    last: int | None,
) -> tuple[wire.Ints, _Columns]:
    """Rows of the steps [first, last] sorted by step and rank, with the rank of each."""
    name, struct = kind
    chunks = schema.chunks.c
    query = select(chunks.kind, chunks.rank, chunks.payload).where(
        chunks.run_id == run, chunks.attempt == attempt, chunks.kind.in_([name, f"{name}{_OLD_FORM}"])
    )
    if rank is not None:
        query = query.where(chunks.rank.in_([rank, wire.UNKNOWN]))
    if first is not None:
        query = query.where(chunks.last_step >= first)
    if last is not None:
        query = query.where(chunks.first_step <= last)
    parts = [_unpacked(struct, *row) for row in connection.execute(query)]
    ranks = np.concatenate([part[0] for part in parts] or [_NONE])
    joined = {
        field: np.concatenate([part[1][field] for part in parts] or [_NONE]) for field in struct.__struct_fields__
    }
    step = joined["step"]
    lowest, highest = (0 if first is None else first), (2**62 if last is None else last)
    among = (step >= lowest) & (step <= highest)
    if rank is not None:
        among &= ranks == rank
    wanted = np.flatnonzero(among)
    order = wanted[np.lexsort((ranks[wanted], step[wanted]))]
    return ranks[order], struct(**{field: values[order] for field, values in joined.items()})


def _unpacked(struct: type[_Columns], kind: str, rank: int, payload: bytes) -> tuple[wire.Ints, dict[str, wire.Ints]]:
    """A chunk's ranks and columns."""
    if kind.endswith(_OLD_FORM):
        found: Any = wire.unpack(zstandard.decompress(payload), struct)
    elif kind == "spans":
        found = wire.unpack_spans(payload)
    else:
        unpacked = wire.unpack_steps(payload) if struct is wire.Steps else packing.unpack(payload)
        return unpacked.pop("rank"), unpacked
    return np.full(len(found.step), rank, np.int64), {name: getattr(found, name) for name in struct.__struct_fields__}


def runs_query(workspace: str, before: tuple[int, str] | None, limit: int) -> Select[Any]:
    """A workspace's runs, newest first, from the cursor on: (created_ns, run) of the last one had."""
    c = schema.runs.c
    query = select(c.run_id).where(c.workspace == workspace).order_by(c.created_ns.desc(), c.run_id).limit(limit)
    if before is not None:
        at, run = before
        query = query.where((c.created_ns < at) | ((c.created_ns == at) & (c.run_id > run)))
    return query


def run(connection: Connection, run_id: str) -> Run | None:
    """One run with the sums over its latest attempt's sources."""
    runs, sources = schema.runs.c, schema.sources.c
    found = connection.execute(select(schema.runs).where(runs.run_id == run_id)).one_or_none()
    if found is None:
        return None
    sums = connection.execute(
        select(
            func.coalesce(func.max(sources.world_size), 0).label("world_size"),
            func.count().label("ranks"),
            func.coalesce(func.max(sources.last_step) + 1, 0).label("steps"),
            func.coalesce(func.sum(sources.emitted), 0).label("emitted"),
            func.coalesce(func.sum(sources.dropped), 0).label("dropped"),
            func.coalesce(func.max(_later(connection, sources)), 0).label("last_step_seen_ns"),
            func.coalesce(func.sum(case((sources.goodbye, 1), else_=0)), 0).label("goodbyes"),
        ).where(sources.run_id == run_id, sources.attempt == found.attempt)
    ).one()
    return Run(
        run=run_id,
        attempt=found.attempt,
        created_ns=found.created_ns,
        last_seen_ns=found.last_seen_ns,
        commits=found.commits,
        **{name: int(value) for name, value in sums._mapping.items()},
    )


def _later(connection: Connection, sources: Any) -> Any:
    """A source that has not stepped yet counts from when it was first seen."""
    greatest = func.max if connection.dialect.name == "sqlite" else func.greatest
    return greatest(sources.last_step_seen_ns, sources.first_seen_ns)


def attempts(connection: Connection, run_id: str) -> list[Attempt]:
    """The run's attempts, oldest first."""
    c = schema.attempts.c
    query = select(c.attempt, c.ordinal, c.first_seen_ns).where(c.run_id == run_id).order_by(c.ordinal)
    return [Attempt(*row) for row in connection.execute(query)]


def sources(connection: Connection, run_id: str, attempt: str) -> list[Source]:
    """The attempt's sources, by rank."""
    c, b = schema.sources.c, schema.batches.c
    query = select(schema.sources).where(c.run_id == run_id, c.attempt == attempt).order_by(c.rank, c.first_seen_ns)
    gaps = {
        row[0]: int(row[1])
        for row in connection.execute(
            select(b.source, func.max(b.seq) + 1 - func.count()).where(b.run_id == run_id).group_by(b.source)
        )
    }
    return [_source(row, gaps.get(row.source, 0)) for row in connection.execute(query)]


def layouts(connection: Connection, run_id: str, attempt: str) -> list[wire.Layout]:
    """Each module's layouts, as the lowest rank that told them told them."""
    c, s = schema.layouts.c, schema.sources.c
    query = (
        select(c.body)
        .join(schema.sources, (s.run_id == c.run_id) & (s.source == c.source))
        .where(c.run_id == run_id, s.run_id == run_id, s.attempt == attempt)
        .order_by(c.module, c.revision, s.rank)
    )
    found: dict[tuple[int, int], wire.Layout] = {}
    for (body,) in connection.execute(query):
        layout = msgspec.json.decode(body, type=wire.Layout)
        found.setdefault((layout.module, layout.revision), layout)
    return list(found.values())


def told(connection: Connection, what: str, run_id: str, attempt: str) -> list[tuple[int, Any]]:
    """(rank, record) of the unused sets or the events of an attempt, in the order in which each rank told them."""
    table, kind = {"unused": (schema.unused, wire.Unused), "events": (schema.events, wire.Event)}[what]
    c, s = table.c, schema.sources.c
    query = (
        select(s.rank, c.body)
        .join(schema.sources, (s.run_id == c.run_id) & (s.source == c.source))
        .where(c.run_id == run_id, s.run_id == run_id, s.attempt == attempt)
        .order_by(s.rank, c.seq, c.position)
    )
    return [(row[0], msgspec.json.decode(row[1], type=kind)) for row in connection.execute(query)]


def rollups(connection: Connection, run_id: str, attempt: str) -> list[Rollup]:
    """Sums by rank."""
    names = [column.name for column in schema.rollups.columns if not column.primary_key]
    rows = connection.execute(_summed(schema.rollups, names, run_id, attempt, ())).all()
    return [
        Rollup(
            rank=row.rank,
            steps=int(row.steps),
            wall_ns=int(row.wall_ns),
            phases_ns={phase: int(getattr(row, f"{phase}_ns")) for phase in wire.PHASES},
            comm_ns=int(row.comm_ns),
            samples=int(row.samples),
            own_ns=int(row.own_ns),
            own_steps=int(row.own_steps),
        )
        for row in rows
    ]


def bucket_rollups(connection: Connection, run_id: str, attempt: str) -> list[BucketRollup]:
    """Sums by rank and bucket."""
    names = ["steps", "compute_ns", "comm_ns", "exposed_ns"]
    rows = connection.execute(_summed(schema.bucket_rollups, names, run_id, attempt, ("module", "revision", "bucket")))
    return [BucketRollup(**{key: int(value) for key, value in row._mapping.items()}) for row in rows]


def peer_totals(connection: Connection, run_id: str, attempt: str) -> list[PeerTotal]:
    """Straggler statistics by rank."""
    p, s = schema.peer_totals.c, schema.sources.c
    names = [column.name for column in schema.peer_totals.columns if not column.primary_key]
    query = (
        select(p.rank, *(_sum(p[name]).label(name) for name in names))
        .join(schema.sources, (s.run_id == p.run_id) & (s.source == p.source))
        .where(p.run_id == run_id, s.run_id == run_id, s.attempt == attempt)
        .group_by(p.rank)
        .order_by(p.rank)
    )
    return [
        PeerTotal(
            rank=row.rank,
            steps=int(row.steps),
            delay_ns=int(row.delay_ns),
            wait_ns=int(row.wait_ns),
            straggler_steps={phase: int(getattr(row, f"straggler_{phase}")) for phase in wire.OWN_PHASES},
        )
        for row in connection.execute(query)
    ]


def histogram(connection: Connection, run_id: str, attempt: str) -> list[int]:
    """Steps of all ranks under each of `STEP_BOUNDS_S`, not cumulated, and above the last."""
    h, s = schema.step_histogram.c, schema.sources.c
    query = (
        select(h.bound, func.sum(h.steps))
        .join(schema.sources, (s.run_id == h.run_id) & (s.source == h.source))
        .where(h.run_id == run_id, s.run_id == run_id, s.attempt == attempt)
        .group_by(h.bound)
    )
    counts = [0] * (len(schema.STEP_BOUNDS_S) + 1)
    for bound, count in connection.execute(query):
        counts[bound] = int(count)
    return counts


_NONE = np.zeros(0, np.int64)


def _sum(column: Any) -> Any:
    """A sum that absurd values do not overflow: SQLite raises where one of integers does."""
    return func.sum(cast(column, Double))


def _summed(table: Any, names: list[str], run_id: str, attempt: str, by: tuple[str, ...]) -> Select[Any]:
    c, s = table.c, schema.sources.c
    keys = [c[name] for name in by]
    return (
        select(s.rank, *keys, *(_sum(c[name]).label(name) for name in names))
        .join(schema.sources, (s.run_id == c.run_id) & (s.source == c.source))
        .where(c.run_id == run_id, s.run_id == run_id, s.attempt == attempt)
        .group_by(s.rank, *keys)
        .order_by(s.rank, *keys)
    )


def _source(row: Row[Any], missing: int) -> Source:
    return Source(
        source=row.source,
        attempt=row.attempt,
        rank=row.rank,
        world_size=row.world_size,
        emitted=row.emitted,
        dropped=row.dropped,
        last_seen_ns=row.last_seen_ns,
        last_step_seen_ns=row.last_step_seen_ns,
        last_step=row.last_step,
        anchor=wire.Anchor(wall_ns=row.wall_ns, monotonic_ns=row.monotonic_ns),
        hello=msgspec.json.decode(row.hello, type=wire.Hello) if row.hello else None,
        pulse=msgspec.json.decode(row.pulse, type=wire.Pulse) if row.pulse else None,
        goodbye=row.goodbye,
        missing_batches=missing,
    )
