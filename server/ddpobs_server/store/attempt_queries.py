"""Attempts of a run, and the rows of an attempt."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Connection, Row, case, func, select

from ddpobs import wire
from ddpobs_server.store import aggregate_queries, bucket_sums, endings, schema
from ddpobs_server.store.aggregate_queries import float_sum, sources_of_attempt
from ddpobs_server.store.rows import Attempt, AttemptSummary, BucketRollup, Rollup, Source

_END_EVENTS = 10_000
"""Most events that `end_events` returns."""


def attempts(connection: Connection, run: str) -> list[Attempt]:
    """The run's attempts, oldest first."""
    c = schema.attempts.c
    query = select(c.attempt, c.ordinal, c.first_seen_ns).where(c.run_id == run).order_by(c.ordinal)
    return [Attempt(*row) for row in connection.execute(query)]


def attempt_summaries(connection: Connection, run: str) -> list[AttemptSummary]:
    """The run's attempts with the sums over their sources, oldest first."""
    a, s = schema.attempts.c, schema.sources.c
    keys = (a.attempt, a.ordinal, a.first_seen_ns)
    query = (
        select(
            *keys,
            func.coalesce(func.max(s.last_seen_ns), a.first_seen_ns),
            func.coalesce(func.max(s.world_size), 0),
            func.count(s.source),
            func.coalesce(func.max(case((s.last_step_seen_ns > 0, s.last_step + 1), else_=0)), 0),
            *endings.counts(),
        )
        .outerjoin(schema.sources, (s.run_id == a.run_id) & (s.attempt == a.attempt))
        .where(a.run_id == run)
        .group_by(a.run_id, *keys)
        .order_by(a.ordinal)
    )
    return [AttemptSummary(row[0], *map(int, row[1:])) for row in connection.execute(query)]


def end_events(connection: Connection, run: str) -> list[tuple[str, int, wire.Event]]:
    """(attempt, rank, event): the ends of sources that did not finish, of the latest attempts first; bounded."""
    e, s, a = schema.events.c, schema.sources.c, schema.attempts.c
    query = (
        select(s.attempt, s.rank, e.body)
        .select_from(schema.events)
        .join(schema.sources, (s.run_id == e.run_id) & (s.source == e.source))
        .join(schema.attempts, (a.run_id == s.run_id) & (a.attempt == s.attempt))
        .where(e.run_id == run, e.kind.in_(("failed", "died", "terminated")) | e.kind.startswith("died:"))
        .order_by(a.ordinal.desc(), s.rank, e.seq, e.position)
        .limit(_END_EVENTS)
    )
    result = []
    for attempt, rank, body in connection.execute(query):
        event = msgspec.json.decode(body, type=wire.Event)
        result.append((attempt, aggregate_queries.rank_of(event, rank), event))
    return result


def sources(connection: Connection, run: str, attempt: str) -> list[Source]:
    """The attempt's sources, by rank."""
    c = schema.sources.c
    query = select(schema.sources).where(c.run_id == run, c.attempt == attempt).order_by(c.rank, c.first_seen_ns)
    return [_source(row) for row in connection.execute(query)]


def missing_batches(connection: Connection, run: str, attempt: str) -> dict[str, tuple[int, int]]:
    """(missing, sent) batches of each source that sent its goodbye, by gaps in its sequence numbers.

    A live source is left out, because a batch may still be on its way. The query counts all of the attempt's batches,
    which takes long for a long run.
    """
    c, b = schema.sources.c, schema.batches.c
    ended = select(c.source).where(c.run_id == run, c.attempt == attempt, c.goodbye)
    counts = select(b.source, func.max(b.seq) + 1, func.count()).where(b.run_id == run, b.source.in_(ended))
    rows = connection.execute(counts.group_by(b.source))
    return {source: (sent_count - stored, sent_count) for source, sent_count, stored in rows}


def has_gaps(connection: Connection, run: str, attempt: str) -> bool:
    """Whether a batch is missing before another of its source; a live source's may still be on its way.

    The attempt's batches are counted only if the run has fewer batches than its sources' last sequence numbers imply.
    """
    c, b, r = schema.sources.c, schema.batches.c, schema.runs.c
    last = select(func.max(b.seq)).where(b.run_id == run, b.source == c.source).correlate(schema.sources)
    sent_count = select(float_sum(last.scalar_subquery() + 1)).where(c.run_id == run).scalar_subquery()
    if not connection.execute(select(sent_count > r.commits).where(r.run_id == run)).scalar():
        return False
    of_attempt = select(c.source).where(c.run_id == run, c.attempt == attempt)
    batches = select(b.source).where(b.run_id == run, b.source.in_(of_attempt)).group_by(b.source)
    return connection.execute(batches.having(func.max(b.seq) + 1 > func.count()).limit(1)).first() is not None


def layouts(connection: Connection, run: str, attempt: str) -> list[wire.Layout]:
    """Each module's layouts, by revision, from the lowest rank that sent them."""
    return [layout for _, layout in aggregate_queries.layouts(connection, sources_of_attempt(run, attempt))]


def unused(
    connection: Connection, run: str, attempt: str, module: int | None = None, limit: int = 1000
) -> list[tuple[int, wire.Unused]]:
    """(rank, unused set) in the order in which each rank sent them: the latest `limit`, of a module or of all."""
    rows = aggregate_queries.unused(connection, sources_of_attempt(run, attempt), module=module, limit=limit)
    return [row[1:] for row in rows]


def latest_unused(connection: Connection, run: str, attempt: str) -> list[tuple[int, wire.Unused]]:
    """(rank, unused set): the latest few sets with names, and the latest few empty sets, of each source and module."""
    latest = aggregate_queries.UNUSED_JUDGED
    rows = aggregate_queries.unused(connection, sources_of_attempt(run, attempt), latest=latest)
    return [row[1:] for row in rows]


def first_events(connection: Connection, run: str, attempt: str) -> list[tuple[int, wire.Event]]:
    """(rank, event): the first event of each source and kind."""
    return [row[1:] for row in aggregate_queries.events(connection, sources_of_attempt(run, attempt))]


def rollups(connection: Connection, run: str, attempt: str) -> list[Rollup]:
    """Sums by rank."""
    return [rollup for _, rollup in aggregate_queries.rollups(connection, sources_of_attempt(run, attempt))]


def bucket_rollups(connection: Connection, run: str, attempt: str) -> list[BucketRollup]:
    """Sums by bucket, over all ranks."""
    return [rollup for _, rollup in bucket_sums.read(connection, sources_of_attempt(run, attempt))[0]]


def _source(row: Row[Any]) -> Source:
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
        ended=row.ended,
        stuck_ns=row.stuck_ns,
        first_seen_ns=row.first_seen_ns,
        account=msgspec.json.decode(row.account, type=wire.Account) if row.account else None,
    )
