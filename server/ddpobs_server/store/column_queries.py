"""Columns and rows back out of the tables."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import msgspec
import numpy as np
from sqlalchemy import ColumnElement, Connection, Double, Row, case, cast, func, select

from ddpobs import wire
from ddpobs.wire.columns import Columns
from ddpobs_server.store import chunks, schema
from ddpobs_server.store.aggregate_queries import added
from ddpobs_server.store.rows import Attempt, Source

_PAGE_CHUNKS = 20_000
"""Most chunks that one page is made of."""
_MOST_BYTES = 200_000_000
"""Most that the columns of one read take in memory, before they are sorted."""
_NONE = np.zeros(0, np.int64)
_STORED_SOURCE_FIELDS = {field.name for field in fields(Source)} & set(schema.sources.c.keys()) - {"hello", "pulse"}
_Columns = TypeVar("_Columns", bound=Columns)


class TooManyRowsError(ValueError):
    """More rows are asked for than one read takes."""

    def __init__(self) -> None:
        super().__init__(f"these steps have more rows than one read takes: {_MOST_BYTES} bytes of columns")


@dataclass(frozen=True)
class ColumnQuery:
    """What of an attempt's columns is asked for: a kind, the steps [first, last], and some ranks or all."""

    kind: str
    run: str
    attempt: str
    ranks: Collection[int] | None
    first: int | None
    last: int | None

    def overlapping(self) -> list[ColumnElement[bool]]:
        """Which chunks may hold some of it."""
        c = schema.chunks.c
        conditions = [c.run_id == self.run, c.attempt == self.attempt, c.kind.in_(chunks.kinds(self.kind))]
        if self.ranks is not None:
            conditions.append(c.rank.in_([*self.ranks, wire.UNKNOWN]))
        if self.first is not None:
            conditions.append(c.last_step >= self.first)
        if self.last is not None:
            conditions.append(c.first_step <= self.last)
        return conditions


def columns(connection: Connection, kind: type[_Columns], part: ColumnQuery) -> tuple[wire.Ints, _Columns]:
    """Rows sorted by step and rank, with the rank of each.

    Raises:
        TooManyRowsError: They take too much memory; what chunks say of themselves may be a client's invention.
    """
    c = schema.chunks.c
    lowest, highest = (0 if part.first is None else part.first), (2**62 if part.last is None else part.last)
    parts = []
    size_bytes = 0
    for chunk in connection.execute(select(c.kind, c.rank, c.payload).where(*part.overlapping())):
        found = chunks.unpack(*chunk)
        among = (found["step"] >= lowest) & (found["step"] <= highest)
        if part.ranks is not None and chunk.rank == wire.UNKNOWN:
            among &= np.isin(found["rank"], list(part.ranks))
        # A chunk holds a hundred steps where perhaps one is asked for.
        parts.append(found if among.all() else {field: values[among] for field, values in found.items()})
        size_bytes += sum(values.nbytes for values in parts[-1].values())
        if size_bytes > _MOST_BYTES:
            raise TooManyRowsError

    def joined(name: str) -> wire.Ints:
        return np.concatenate([found[name] for found in parts] or [_NONE])

    rank = joined("rank")
    order = np.lexsort((rank, joined("step")))
    table = np.empty((len(kind.names), len(order)), np.int64)
    for name, row in zip(kind.names, table, strict=True):
        np.take(joined(name), order, out=row)
    return rank[order], kind.from_table(table)


def rows_held(connection: Connection, part: ColumnQuery) -> int:
    """About how many rows there are: a chunk's count as spread evenly over its steps, and no columns are read."""
    c = schema.chunks.c
    begin = c.first_step if part.first is None else case((c.first_step < part.first, part.first), else_=c.first_step)
    end = c.last_step if part.last is None else case((c.last_step > part.last, part.last), else_=c.last_step)
    share = cast(end - begin + 1, Double) / (c.last_step - c.first_step + 1)
    query = select(func.coalesce(func.sum(c.rows * share), 0.0)).where(*part.overlapping())
    return int(connection.execute(query).scalar_one())


def page_end(connection: Connection, part: ColumnQuery, rows: int) -> int | None:
    """The last of as many steps, from the first on, as hold about so many rows, at least one; None where all do.

    A chunk's rows count as spread evenly over its steps: no columns are read.
    """
    c = schema.chunks.c
    query = select(c.first_step, c.last_step, c.rows, c.rank).where(*part.overlapping())
    found = list(connection.execute(query.order_by(c.last_step).limit(_PAGE_CHUNKS)))
    if not found:
        return None
    last, more = part.last, len(found) == _PAGE_CHUNKS
    if more:
        reached = found[-1].last_step
        last = reached if last is None else min(last, reached)
        found += connection.execute(query.where(c.last_step > reached, c.first_step <= last))
    begin, final, held, rank = np.array([tuple(row) for row in found], np.int64).T
    steps = final - begin + 1
    if part.ranks is not None:
        held = np.where(rank == wire.UNKNOWN, np.minimum(held, steps * len(part.ranks)), held)
    each = held / steps
    begin = np.maximum(begin, 0 if part.first is None else part.first)
    end = final + 1 if last is None else np.minimum(final, last) + 1
    at = np.concatenate([begin, end])
    order = np.argsort(at, kind="stable")
    at, slope = at[order], np.cumsum(np.concatenate([each, -each])[order])
    before = np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(at))])
    if before[-1] <= rows:
        return last if more else None
    place = int(np.searchsorted(before, rows, "right")) - 1
    return max(int(at[0]), int(at[place] + (rows - before[place]) / slope[place]) - 1)


def attempts(connection: Connection, run_id: str) -> list[Attempt]:
    """The run's attempts, oldest first."""
    c = schema.attempts.c
    query = select(c.attempt, c.ordinal, c.first_seen_ns).where(c.run_id == run_id).order_by(c.ordinal)
    return [Attempt(*row) for row in connection.execute(query)]


def sources(connection: Connection, run_id: str, attempt: str) -> list[Source]:
    """The attempt's sources, by rank."""
    c = schema.sources.c
    query = select(schema.sources).where(c.run_id == run_id, c.attempt == attempt).order_by(c.rank, c.first_seen_ns)
    return [_source(row) for row in connection.execute(query)]


def missing_batches(connection: Connection, run_id: str, attempt: str) -> dict[str, tuple[int, int]]:
    """By source that has said goodbye, how many batches are missing of those it sent, and how many these are.

    Gaps in its sequence numbers tell: while it lives one may still be under way.

    All of the attempt's batches are counted: of a long run that takes long.
    """
    c, b = schema.sources.c, schema.batches.c
    gone = select(c.source).where(c.run_id == run_id, c.attempt == attempt, c.goodbye)
    told = select(b.source, func.max(b.seq) + 1, func.count()).where(b.run_id == run_id, b.source.in_(gone))
    return {source: (sent - here, sent) for source, sent, here in connection.execute(told.group_by(b.source))}


def has_gaps(connection: Connection, run_id: str, attempt: str) -> bool:
    """Whether a batch is missing before another of its source; of one that lives it may be under way.

    All of the attempt's batches are counted only where fewer were stored of the run than its sources' last ones tell.
    """
    c, b, r = schema.sources.c, schema.batches.c, schema.runs.c
    last = select(func.max(b.seq)).where(b.run_id == run_id, b.source == c.source).correlate(schema.sources)
    sent = select(added(last.scalar_subquery() + 1)).where(c.run_id == run_id).scalar_subquery()
    if not connection.execute(select(sent > r.commits).where(r.run_id == run_id)).scalar():
        return False
    here = select(c.source).where(c.run_id == run_id, c.attempt == attempt)
    told = select(b.source).where(b.run_id == run_id, b.source.in_(here)).group_by(b.source)
    return connection.execute(told.having(func.max(b.seq) + 1 > func.count()).limit(1)).first() is not None


def _source(row: Row[Any]) -> Source:
    stored = {name: getattr(row, name) for name in _STORED_SOURCE_FIELDS}
    return Source(
        **stored,
        anchor=wire.Anchor(wall_ns=row.wall_ns, monotonic_ns=row.monotonic_ns),
        hello=msgspec.json.decode(row.hello, type=wire.Hello) if row.hello else None,
        pulse=msgspec.json.decode(row.pulse, type=wire.Pulse) if row.pulse else None,
    )
