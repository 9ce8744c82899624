"""Sums of each rank's buckets, packed into a row per rank and layout. A row per bucket would multiply the row count.

Sums are packed as float64: exact up to 2^53, which is 104 days in ns, and no absurd time overflows them.

The rows are updated under the run's own lock. With a row per bucket, a scrape of 1,088 ranks took five times as long to
read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import BigInteger, Connection, Dialect, Select, and_, bindparam, or_, select, text

from ddpobs import wire
from ddpobs_server.store import schema
from ddpobs_server.store.aggregate_rows import BucketRollup
from ddpobs_server.store.database.sql import compiled, execute_one, execute_rows, insert, padded
from ddpobs_server.store.selected_sources import SelectedSources

SUMS = ("steps", "compute_ns", "comm_ns", "exposed_ns")
Table = npt.NDArray[np.float64]
"""Shape [1 + sums, buckets]: the ascending indices of the buckets, and below them each of `SUMS`."""
Tables = npt.NDArray[np.float64]
"""Shape [rows, 1 + sums, buckets]."""
Sizes = npt.NDArray[np.float64]
"""Shape [buckets]."""
Key = tuple[str, str, int, int]
"""Run, source, module and revision: a row's primary key."""
_KEY = ("run_id", "source", "module", "revision")
_GROUP_ROWS = 64
"""Rows that a statement looks up, and that are unpacked together: each may hold many buckets."""
_LAYOUTS = 1000
"""Layouts of which a statement reads the sums."""


def build_table(bucket: wire.Ints, sums: Any) -> Table:
    """Sums of buckets in any order; a bucket may occur more than once.

    Args:
        bucket: Index of each bucket, shape [buckets].
        sums: In the order of `SUMS`, shape [sums, buckets].
    """
    if (bucket[1:] > bucket[:-1]).all():
        return np.concatenate([bucket[None], sums]).astype(np.float64)
    distinct, index = np.unique(bucket, return_inverse=True)
    table = np.zeros((1 + len(SUMS), len(distinct)))
    table[0] = distinct
    for total, values in zip(table[1:], sums, strict=True):
        np.add.at(total, index, values)
    return table


def add_tables(a: Table, b: Table) -> Table:
    """The sums of both tables."""
    if np.array_equal(a[0], b[0]):
        total = a + b
        total[0] = a[0]
        return total
    columns = np.concatenate([a, b], axis=1)
    return build_table(columns[0], columns[1:])


def add(connection: Connection, sums: Mapping[Key, Table]) -> Counter[str]:
    """Add to the stored sums. The caller must hold the locks on the runs' own rows until the transaction ends.

    Returns:
        Growth of the packed sums in bytes, by run.
    """
    growth: Counter[str] = Counter()
    keys = sorted(sums)
    for first in range(0, len(keys), _GROUP_ROWS):
        group = keys[first : first + _GROUP_ROWS]
        stored = _stored(connection, group)
        rows = [(*key, _pack(add_tables(stored[key], sums[key]) if key in stored else sums[key])) for key in group]
        execute_rows(connection, _upsert(connection.dialect), rows)
        for key, row in zip(group, rows, strict=True):
            growth[key[0]] += len(row[-1]) - (stored[key].nbytes if key in stored else 0)
    return growth


def read_named(
    connection: Connection, sources: SelectedSources, size_of: Mapping[tuple[str, int, int], Sizes]
) -> tuple[list[tuple[str, BucketRollup]], dict[str, dict[int, float]]]:
    """The sums of the buckets that a layout names. Rows of other modules and revisions are not read.

    Args:
        connection: To the database.
        sources: The sources.
        size_of: Sizes of the buckets of each layout, by run, module and revision.

    Returns:
        (run, sums) over all ranks by module, revision and bucket; and by run the bytes of buckets that each rank
        reduced.
    """
    totals: dict[tuple[str, int, int], Table] = {}
    reduced: dict[str, dict[int, float]] = {}
    for group in _of_layouts(connection, sources, sorted({key[1:] for key in size_of})):
        for key, ranks, all_tables in _by_buckets(group):
            if key not in size_of:  # A layout of another run has its module and revision.
                continue
            sizes = size_of[key]
            tables = all_tables[:, :, all_tables[0, 0] < len(sizes)]
            _add_to(totals, key, tables)
            size_bytes = np.dot(tables[:, 1], sizes[tables[0, 0].astype(np.int64)])
            of_run = reduced.setdefault(key[0], {})
            for rank, reduced_bytes in zip(ranks, size_bytes.tolist(), strict=True):
                of_run[rank] = of_run.get(rank, 0.0) + reduced_bytes
    return _by_bucket(totals), reduced


def _of_layouts(
    connection: Connection, sources: SelectedSources, layouts: Sequence[tuple[int, int]]
) -> Iterator[Sequence[Any]]:
    """Groups of rows with the module and the revision of one of the layouts. All runs mostly have the same few."""
    for first in range(0, len(layouts), _LAYOUTS):
        count, values = padded(layouts[first : first + _LAYOUTS], "module", "revision")
        yield from sources.execute(connection, _sums_of, count, yield_per=_GROUP_ROWS, **values).partitions()


def _sums_of(sources: SelectedSources, count: int | None = None) -> Select[Any]:
    """Rows of a number of layouts, None for all."""
    c = schema.bucket_sums.c
    query = select(sources.c.run_id, sources.c.rank, c.module, c.revision, c.sums)
    query = query.join(*sources.joined(schema.bucket_sums))
    if count is None:
        return query
    module, revision = (
        [bindparam(f"{name}_{index}", type_=BigInteger) for index in range(count)] for name in ("module", "revision")
    )
    return query.where(or_(*map(and_, map(c.module.__eq__, module), map(c.revision.__eq__, revision))))


def read(connection: Connection, sources: SelectedSources, limit: int) -> tuple[list[tuple[str, BucketRollup]], bool]:
    """(run, sums) over all ranks by module, revision and bucket, at most `limit` buckets; and whether some are missing.

    Once the limit is reached, modules and revisions that were not seen before are left out.
    """
    totals: dict[tuple[str, int, int], Table] = {}
    is_short = False
    for group in sources.execute(connection, _sums_of, yield_per=_GROUP_ROWS).partitions():
        for key, _, tables in _by_buckets(group):
            if key in totals or sum(table.shape[1] for table in totals.values()) + tables.shape[2] <= limit:
                _add_to(totals, key, tables)
            else:
                is_short = True
    return _by_bucket(totals), is_short


def _add_to(totals: dict[tuple[str, int, int], Table], key: tuple[str, int, int], tables: Tables) -> None:
    table = tables.sum(axis=0)
    table[0] = tables[0, 0]
    totals[key] = add_tables(totals[key], table) if key in totals else table


def _by_bucket(totals: Mapping[tuple[str, int, int], Table]) -> list[tuple[str, BucketRollup]]:
    return [
        (run, BucketRollup(module, revision, *map(int, row)))
        for (run, module, revision), table in sorted(totals.items())
        for row in table.T.tolist()
    ]


def _by_buckets(rows: Iterable[Any]) -> Iterator[tuple[tuple[str, int, int], list[int], Tables]]:
    """(run, module, revision), ranks and tables of the rows that have the same buckets."""
    groups: dict[tuple[str, int, int, bytes], list[tuple[int, bytes]]] = {}
    for run, rank, module, revision, packed in rows:
        key = run, module, revision, packed[: len(packed) // (1 + len(SUMS))]
        groups.setdefault(key, []).append((rank, packed))
    for (run, module, revision, _), group in groups.items():
        tables = np.frombuffer(b"".join([packed for _, packed in group]), "<f8")
        yield (run, module, revision), [rank for rank, _ in group], tables.reshape(len(group), 1 + len(SUMS), -1)


def _pack(table: Table) -> bytes:
    return table.astype("<f8", copy=False).tobytes()


def _unpack(packed: bytes) -> Table:
    return np.frombuffer(packed, "<f8").reshape(1 + len(SUMS), -1)


def _stored(connection: Connection, keys: list[Key]) -> dict[Key, Table]:
    values = {f"{name}_{index}": value for index, key in enumerate(keys) for name, value in zip(_KEY, key, strict=True)}
    sql, order = _lookup(connection.dialect, len(keys))
    rows = execute_one(connection, sql, [values[name] for name in order])
    return {(run, source, module, revision): _unpack(packed) for run, source, module, revision, packed in rows}


@cache
def _lookup(dialect: Dialect, count: int) -> tuple[str, tuple[str, ...]]:
    """SQL that finds `count` rows by their keys, and the names of its parameters in order."""
    keys = (" AND ".join(f"bucket_sums.{name} = :{name}_{index}" for name in _KEY) for index in range(count))
    query = f"SELECT {', '.join(_KEY)}, sums FROM bucket_sums WHERE {' OR '.join(keys)}"
    return compiled(text(query), dialect)


@cache
def _upsert(dialect: Dialect) -> str:
    """SQL that inserts a row or replaces the row with its key; its parameters are the columns in order."""
    statement = insert(dialect.name, schema.bucket_sums)
    upsert = statement.on_conflict_do_update(index_elements=_KEY, set_={"sums": statement.excluded.sums})
    return compiled(upsert, dialect)[0]
