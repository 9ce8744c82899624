"""Attempts of a run, and the rows of an attempt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, Select, case, func, null, select

from ddpobs import wire
from ddpobs.wire.endings import IMPORTED
from ddpobs_server.store import endings, schema
from ddpobs_server.store.aggregate_rows import BucketRollup, Rollup
from ddpobs_server.store.database.sql import float_sum
from ddpobs_server.store.queries import aggregate_queries, layout_queries, unused_queries
from ddpobs_server.store.rows import Attempt, AttemptSummary, Source
from ddpobs_server.store.selected_sources import sources_of_attempt
from ddpobs_server.store.sums import bucket_sums

_END_EVENTS, _END_EVENT_BYTES = 10_000, 8_000_000
"""Maximum number of events that `end_events` returns, and their most bytes: a traceback may have 16,384 characters."""
_LARGE = ("hello", "pulse", "stuck_pulse")
"""Columns with most of a source's bytes."""
_PULSE_BYTES, _SHORT_PULSE = 16_000_000, 512
"""Bytes of an attempt's pulses after which a long pulse loses its stack and places."""


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
        .outerjoin(schema.sources, (s.run_id == run) & (s.attempt == a.attempt))
        .where(a.run_id == run)
        .group_by(a.run_id, *keys)
        .order_by(a.ordinal)
    )
    return [AttemptSummary(row[0], *map(int, row[1:])) for row in connection.execute(query)]


def imported_steps(connection: Connection, runs: Sequence[str]) -> dict[tuple[str, str], int]:
    """Steps that the files of each imported attempt hold, by (run, attempt): they may begin in mid-training."""
    s, t = schema.sources.c, schema.rollups.c
    query = (
        select(s.run_id, s.attempt, func.sum(t.steps))
        .join(schema.rollups, (t.run_id == s.run_id) & (t.source == s.source))
        .where(s.run_id.in_(runs), t.run_id.in_(runs), s.ended == IMPORTED)
        .group_by(s.run_id, s.attempt, s.source)
    )
    held: dict[tuple[str, str], int] = {}
    for run, attempt, steps in connection.execute(query):
        held[run, attempt] = max(held.get((run, attempt), 0), int(steps))
    return held


def end_events(connection: Connection, run: str) -> list[tuple[str, int, wire.Event]]:
    """(attempt, rank, event): the ends of sources that did not finish, of the latest attempts first; bounded."""
    e, s, a = schema.events.c, schema.sources.c, schema.attempts.c
    query = (
        select(s.attempt, s.rank, e.body)
        .select_from(schema.events)
        .join(schema.sources, (s.run_id == run) & (s.source == e.source))
        .join(schema.attempts, (a.run_id == run) & (a.attempt == s.attempt))
        .where(e.run_id == run, e.kind.in_(aggregate_queries.ENDS) | e.kind.startswith("died:"))
        .order_by(a.ordinal.desc(), s.rank, e.seq, e.position)
        .limit(_END_EVENTS)
    )
    result = []
    rows = connection.execute(query.execution_options(yield_per=64))
    for attempt, rank, body in aggregate_queries.within_bytes(rows, _END_EVENT_BYTES):
        event = msgspec.json.decode(body, type=wire.Event)
        result.append((attempt, aggregate_queries.rank_of(event, rank), event))
    return result


def sources(connection: Connection, run: str, attempt: str) -> list[Source]:
    """The attempt's sources by rank. Only the first hello has its versions and settings."""
    query = _sources([*schema.sources.c], run, [attempt])
    return list(map(_SourceReader().source, connection.execute(query.execution_options(yield_per=256))))


def sources_of_attempts(connection: Connection, run: str, attempts: Sequence[str]) -> dict[str, list[Source]]:
    """The sources of several attempts by rank, without hello and pulses, which take most of a source's bytes."""
    columns = [column for column in schema.sources.c if column.name not in _LARGE]
    query = _sources([*columns, *(null().label(name) for name in _LARGE)], run, attempts)
    by_attempt: dict[str, list[Source]] = {attempt: [] for attempt in attempts}
    reader = _SourceReader()
    rows: Iterable[Row[Any]] = connection.execute(query.execution_options(yield_per=256))
    for row in rows:
        by_attempt[row.attempt].append(reader.source(row))
    return by_attempt


def _sources(columns: Sequence[Any], run: str, attempts: Sequence[str]) -> Select[Any]:
    """Sources by rank, each with what the ranks measured of its rank."""
    c, p = schema.sources.c, schema.peer_totals.c
    measured = (
        select(
            c.attempt,
            p.rank,
            float_sum(p.moving_ns).label("total_moving_ns"),
            float_sum(p.steps).label("compared_steps"),
        )
        .select_from(schema.sources)
        .join(schema.peer_totals, (p.run_id == run) & (p.source == c.source))
        .where(c.run_id == run, c.attempt.in_(attempts))
        .group_by(c.attempt, p.rank)
        .subquery("measured")
    )
    m = measured.c
    return (
        select(*columns, m.total_moving_ns, m.compared_steps)
        .select_from(schema.sources.outerjoin(measured, (m.attempt == c.attempt) & (m.rank == c.rank)))
        .where(c.run_id == run, c.attempt.in_(attempts))
        .order_by(c.rank, c.first_seen_ns)
    )


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


def layouts(
    connection: Connection,
    run: str,
    attempt: str,
    module: int | None = None,
    limit_bytes: int = layout_queries.RESPONSE_BYTES,
) -> tuple[list[wire.Layout], int]:
    """Each module's layouts by revision from the lowest rank that sent them, and the number that did not fit."""
    return layout_queries.whole(connection, sources_of_attempt(run, attempt), module, limit_bytes)


def unused(
    connection: Connection, run: str, attempt: str, module: int | None = None, limit: int = 1000
) -> tuple[list[tuple[int, wire.Unused]], int]:
    """(rank, unused set) in the order in which each rank sent them, and the number of sets that did not fit.

    The latest `limit` sets, of a module or of all.
    """
    rows = unused_queries.latest(connection, sources_of_attempt(run, attempt), module=module, limit=limit)
    return [row[1:] for row in rows.sets], rows.left_out


def latest_unused(connection: Connection, run: str, attempt: str) -> tuple[list[tuple[int, wire.Unused]], int]:
    """The same for the latest few sets with names, and the latest few empty sets, of each source and module."""
    rows = unused_queries.latest(connection, sources_of_attempt(run, attempt), each=unused_queries.UNUSED_JUDGED)
    return [row[1:] for row in rows.sets], rows.left_out


def first_events(connection: Connection, run: str, attempt: str) -> list[tuple[int, wire.Event]]:
    """(rank, event): the first event of each source and kind."""
    return [row[1:] for row in aggregate_queries.events(connection, sources_of_attempt(run, attempt))]


def rollups(connection: Connection, run: str, attempt: str) -> list[Rollup]:
    """Sums by rank."""
    return [rollup for _, rollup in aggregate_queries.rollups(connection, sources_of_attempt(run, attempt))]


def bucket_rollups(connection: Connection, run: str, attempt: str, limit: int) -> tuple[list[BucketRollup], bool]:
    """Sums by bucket over all ranks, at most `limit` buckets; and whether some are missing."""
    rows, is_short = bucket_sums.read(connection, sources_of_attempt(run, attempt), limit)
    return [rollup for _, rollup in rows], is_short


class _OwnSettings(msgspec.Struct):
    """The settings of a hello that differ over the ranks; None where the rank has none."""

    processors: wire.Scalar = ""
    threads: wire.Scalar = 0
    group_ranks: wire.Scalar = None
    group_first: wire.Scalar = None


class _HelloOutline(msgspec.Struct):
    """A hello without its versions and most of its settings, which are skipped."""

    host: str
    pid: int
    device: str
    backend: str
    settings: _OwnSettings = msgspec.field(default_factory=_OwnSettings)


_decode_hello = msgspec.json.Decoder(wire.Hello).decode
_decode_hello_outline = msgspec.json.Decoder(_HelloOutline).decode
_decode_account = msgspec.json.Decoder(wire.Account).decode
_decode_pulse = msgspec.json.Decoder(wire.Pulse).decode


class _SourceReader:
    """Turns rows into sources. The first hello is kept whole, the others in outline, and long pulses up to a size."""

    def __init__(self) -> None:
        self._has_hello, self._pulse_bytes = False, _PULSE_BYTES
        self._texts: dict[str, str] = {}

    def source(self, row: Row[Any]) -> Source:
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
            hello=self._hello(row.hello) if row.hello else None,
            pulse=self._pulse(row.pulse) if row.pulse else None,
            stuck_pulse=self._pulse(row.stuck_pulse) if row.stuck_pulse else None,
            goodbye=row.goodbye,
            ended=row.ended,
            stuck_ns=row.stuck_ns,
            first_seen_ns=row.first_seen_ns,
            account=_decode_account(row.account) if row.account else None,
            moving_ns_a_step=row.total_moving_ns / row.compared_steps if row.compared_steps else None,
        )

    def _hello(self, text: str) -> wire.Hello:
        if not self._has_hello:
            self._has_hello = True
            return _decode_hello(text)
        outline = _decode_hello_outline(text)
        host, device, backend = (
            self._texts.setdefault(value, value) for value in (outline.host, outline.device, outline.backend)
        )
        known = msgspec.structs.asdict(outline.settings)
        settings = {name: value for name, value in known.items() if value is not None}
        return wire.Hello(host=host, pid=outline.pid, device=device, backend=backend, versions={}, settings=settings)

    def _pulse(self, text: str) -> wire.Pulse:
        pulse = _decode_pulse(text)
        self._pulse_bytes -= len(text)
        if self._pulse_bytes >= 0 or len(text) <= _SHORT_PULSE:
            return pulse
        return msgspec.structs.replace(pulse, place="", stack=[], threads={}, processes={}, code=[])
