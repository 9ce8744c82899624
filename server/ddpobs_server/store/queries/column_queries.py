"""Columns of steps, spans and comms, read from chunks.

Chunks are selected by run, attempt, kind and steps; of each, only the requested rows are kept. A response holds about
100,000 rows and whole steps; `page_end` computes from the chunks' step ranges where the next page begins.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import zstandard
from sqlalchemy import ColumnElement, Connection, Double, case, cast, func, select

from ddpobs import wire
from ddpobs.wire.columns import Columns
from ddpobs_server.store import chunks, schema
from ddpobs_server.store.schema import ROLLUP_STEPS

_PAGE_CHUNKS = 20_000
"""Maximum number of chunks in a page."""
_MAX_BYTES = 200_000_000
"""Maximum memory for the columns of a read."""
_SAMPLES_A_BATCH = 64
"""Samples of a batch that are looked for."""
_MAX_SAMPLES = 256
_NONE = np.zeros(0, np.int64)
_Columns = TypeVar("_Columns", bound=Columns)
_Result_co = TypeVar("_Result_co", bound=Columns, covariant=True)
Ranks = int | Collection[int] | None
"""A rank, several ranks, or all."""


class TooManyRowsError(ValueError):
    """The requested steps have more rows than a read may return."""

    def __init__(self) -> None:
        super().__init__(f"these steps have more rows than one read takes: {_MAX_BYTES} bytes of columns")


@dataclass(frozen=True)
class ColumnQuery:
    """A part of an attempt's columns: a kind, the steps [first, last], and some ranks or all."""

    kind: str
    run: str
    attempt: str
    rank: Ranks
    first: int | None
    last: int | None

    @property
    def ranks(self) -> Collection[int] | None:
        """The ranks; None for all."""
        return [self.rank] if isinstance(self.rank, int) else self.rank

    def overlapping(self) -> list[ColumnElement[bool]]:
        """Conditions for the chunks that may hold some of its rows."""
        c = schema.chunks.c
        conditions = [c.run_id == self.run, c.attempt == self.attempt, c.kind.in_(chunks.kinds(self.kind))]
        if self.ranks is not None:
            conditions.append(c.rank.in_([*self.ranks, wire.UNKNOWN]))
        if self.first is not None:
            conditions.append(c.last_step >= self.first)
        if self.last is not None:
            conditions.append(c.first_step <= self.last)
        return conditions


class _ReadColumns(Protocol[_Result_co]):
    """Rows of the steps in [first, last], sorted by step and rank, with the rank of each.

    Raises:
        TooManyRowsError: The steps have too many rows.
    """

    def __call__(
        self,
        connection: Connection,
        run: str,
        attempt: str,
        rank: Ranks = None,
        first: int | None = None,
        last: int | None = None,
    ) -> tuple[wire.Ints, _Result_co]: ...


def _reader(kind: str, record: type[_Columns]) -> _ReadColumns[_Columns]:
    def read(
        connection: Connection,
        run: str,
        attempt: str,
        rank: Ranks = None,
        first: int | None = None,
        last: int | None = None,
    ) -> tuple[wire.Ints, _Columns]:
        return _read(connection, record, ColumnQuery(kind, run, attempt, rank, first, last))

    return read


def readiness(
    connection: Connection, run: str, attempt: str, ranks: Collection[int], first: int, last: int
) -> list[tuple[int, wire.Readiness]]:
    """Sampled readiness of parameters in the steps in [first, last], the latest first, with its rank; at most 256."""
    c = schema.chunks.c
    statement = select(c.rank, c.payload).where(
        c.run_id == run,
        c.attempt == attempt,
        c.kind.in_([f"readiness-{index}" for index in range(_SAMPLES_A_BATCH)]),
        c.rank.in_(list(ranks)),
        c.first_step >= first,
        c.last_step <= last,
    )
    rows = connection.execute(statement.order_by(c.last_step.desc()).limit(_MAX_SAMPLES))
    return [(row.rank, wire.unpack(zstandard.decompress(row.payload), wire.Readiness)) for row in rows]


def _read(connection: Connection, kind: type[_Columns], query: ColumnQuery) -> tuple[wire.Ints, _Columns]:
    """Rows sorted by step and rank, with the rank of each. Each chunk's rows go to their place in the table at once."""
    c, names = schema.chunks.c, (*kind.names, "rank")
    lowest, highest = (0 if query.first is None else query.first), (2**62 if query.last is None else query.last)
    overlapping = query.overlapping()
    stored = select(func.sum(c.rows)).where(*overlapping).correlate(None).scalar_subquery()
    most = _MAX_BYTES // (8 * len(names))
    table, count = np.empty((len(names), 0), np.int64), 0
    for *chunk, rows in connection.execute(select(c.kind, c.rank, c.payload, stored).where(*overlapping)):
        if not table.size:
            table = np.empty((len(names), min(int(rows), most)), np.int64)
        columns = chunks.unpack(*chunk)
        matches = (columns["step"] >= lowest) & (columns["step"] <= highest)
        if query.ranks is not None and chunk[1] == wire.UNKNOWN:
            matches &= np.isin(columns["rank"], list(query.ranks))
        begin, count = count, count + int(np.count_nonzero(matches))
        if count > most:
            raise TooManyRowsError
        kept = slice(None) if matches.all() else matches
        for name, row in zip(names, table, strict=True):
            row[begin:count] = columns[name][kept]
    table = table[:, :count]
    order = _by_step(table[names.index("step")], table[-1])
    for row in table:
        row[:] = row[order]
    return table[-1], kind.from_table(table[:-1])


def _by_step(step: wire.Ints, rank: wire.Ints) -> wire.Ints:
    """The order of rows by step and rank.

    If each rank has at most one row for a step, and few are missing, each row goes to its place without a sort.
    """
    if not len(step):
        return _NONE
    first, ranks = int(step.min()), int(rank.max()) + 1
    cells = (int(step.max()) - first + 1) * ranks
    if rank.min() >= 0 and cells <= 2 * len(step):
        row_at = np.full(cells, -1)
        row_at[(step - first) * ranks + rank] = np.arange(len(step))
        order = row_at[row_at >= 0]
        if len(order) == len(step):
            return order
    return np.lexsort((rank, step))


steps = _reader("steps", wire.Steps)
spans = _reader("spans", wire.Spans)
comms = _reader("comms", wire.Comms)
"""Communication besides the buckets' all-reduces."""


def estimate_rows(connection: Connection, kind: str, run: str, attempt: str, first: int, last: int) -> int:
    """Approximate number of rows of `steps`, `spans` or `comms` in the steps [first, last].

    A chunk's rows count as spread evenly over its steps; no payload is read.
    """
    c = schema.chunks.c
    begin = case((c.first_step < first, first), else_=c.first_step)
    end = case((c.last_step > last, last), else_=c.last_step)
    share = cast(end - begin + 1, Double) / (c.last_step - c.first_step + 1)
    overlapping = ColumnQuery(kind, run, attempt, None, first, last).overlapping()
    query = select(func.coalesce(func.sum(c.rows * share), 0.0)).where(*overlapping)
    return int(connection.execute(query).scalar_one())


def bins_with_columns(connection: Connection, run: str, attempt: str) -> wire.Ints:
    """Numbers of the bins of steps that have columns, in rising order, and few without a step in between.

    The steps of a chunk may be far apart. Its payload is read only then.
    """
    c = schema.chunks.c
    where = ColumnQuery("steps", run, attempt, None, None, None).overlapping()
    is_sparse = c.last_step - c.first_step > ROLLUP_STEPS * c.rows
    extents = connection.execute(select(c.first_step, c.last_step).where(*where, ~is_sparse).distinct())
    parts = [np.arange(first // ROLLUP_STEPS, last // ROLLUP_STEPS + 1) for first, last in extents]
    sparse = connection.execute(select(c.kind, c.rank, c.payload).where(*where, is_sparse))
    parts += [np.unique(chunks.unpack(*row)["step"] // ROLLUP_STEPS) for row in sparse]
    return np.unique(np.concatenate([_NONE, *parts]))


def page_end(
    connection: Connection,
    kind: str,
    run: str,
    attempt: str,
    *,
    rows: int,
    first: int | None,
    last: int | None,
    rank: Ranks = None,
) -> int | None:
    """End of a page of about `rows` rows of `steps`, `spans` or `comms`.

    A chunk's rows count as spread evenly over its steps; no payload is read.

    Returns:
        The page's last step; a page has at least one step. None if [first, last] fits into a page.
    """
    if first is not None and first == last:
        return None
    query = ColumnQuery(kind, run, attempt, rank, first, last)
    extents, last, more = _chunk_extents(connection, query)
    if not len(extents):
        return None
    begin, final, count, chunk_rank = extents.T
    steps = final - begin + 1
    if query.ranks is not None:
        count = np.where(chunk_rank == wire.UNKNOWN, np.minimum(count, steps * len(query.ranks)), count)
    density = count / steps
    begin = np.maximum(begin, 0 if first is None else first)
    end = final + 1 if last is None else np.minimum(final, last) + 1
    step = _step_of_row(rows, begin, end, density)
    return last if step is None and more else step


def _chunk_extents(connection: Connection, query: ColumnQuery) -> tuple[wire.Ints, int | None, bool]:
    """Extents of the chunks that may hold rows of the query, the last step that they cover, and whether there are more.

    Extents have shape [chunks, 4]: first step, last step, rows, rank.
    """
    c = schema.chunks.c
    statement = select(c.first_step, c.last_step, c.rows, c.rank).where(*query.overlapping())
    chunk_rows = list(connection.execute(statement.order_by(c.last_step).limit(_PAGE_CHUNKS)))
    last, more = query.last, len(chunk_rows) == _PAGE_CHUNKS
    if more:
        reached = chunk_rows[-1].last_step
        last = reached if last is None else min(last, reached)
        chunk_rows += connection.execute(statement.where(c.last_step > reached, c.first_step <= last))
    return np.array([tuple(row) for row in chunk_rows], np.int64).reshape(-1, 4), last, more


def _step_of_row(rows: int, begin: wire.Ints, end: wire.Ints, density: npt.NDArray[np.float64]) -> int | None:
    """Step in which the number of rows exceeds `rows`; None if there are fewer.

    Args:
        rows: The limit.
        begin: First step of each chunk, shape [chunks].
        end: Step after its last, same shape.
        density: Its rows per step, same shape.
    """
    edges = np.concatenate([begin, end])
    order = np.argsort(edges, kind="stable")
    edges, slope = edges[order], np.cumsum(np.concatenate([density, -density])[order])
    rows_before = np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(edges))])
    if rows_before[-1] <= rows:
        return None
    index = int(np.searchsorted(rows_before, rows, "right")) - 1
    return max(int(edges[0]), int(edges[index] + (rows - rows_before[index]) / slope[index]) - 1)
