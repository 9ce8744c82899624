"""What each rank's buckets add up to, a row a rank and layout: one a bucket would be many times as many.

Sums are packed as float64: whole to 2^53, which is 104 days in ns, and no absurd time overflows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import CTE, Connection, Dialect, and_, bindparam, or_, select

from ddpobs import wire
from ddpobs_server.store import schema
from ddpobs_server.store.rows import BucketRollup
from ddpobs_server.store.sql import compiled, insert

SUMS = ("steps", "compute_ns", "comm_ns", "exposed_ns")
Table = npt.NDArray[np.float64]
"""Shape [1 + sums, buckets]: the buckets' indices, rising, and below them each of `SUMS`."""
Tables = npt.NDArray[np.float64]
"""Shape [rows, 1 + sums, buckets]."""
Sizes = npt.NDArray[np.float64]
"""Shape [buckets]."""
Key = tuple[str, str, int, int]
"""Run, source, module and revision: a row's primary key."""
_KEY = ("run_id", "source", "module", "revision")
_AT_ONCE = 64
"""Rows that one statement looks for, and that are read together: each may hold many buckets."""


def table(bucket: wire.Ints, sums: Any) -> Table:
    """Sums of buckets in any order, of which one may come twice.

    Args:
        bucket: Index of each, shape [buckets].
        sums: As `SUMS`, shape [sums, buckets].
    """
    if (bucket[1:] > bucket[:-1]).all():
        return np.concatenate([bucket[None], sums]).astype(np.float64)
    united, place = np.unique(bucket, return_inverse=True)
    found = np.zeros((1 + len(SUMS), len(united)))
    found[0] = united
    for total, values in zip(found[1:], sums, strict=True):
        np.add.at(total, place, values)
    return found


def added(one: Table, other: Table) -> Table:
    """The sums of both."""
    if np.array_equal(one[0], other[0]):
        total = one + other
        total[0] = one[0]
        return total
    together = np.concatenate([one, other], axis=1)
    return table(together[0], together[1:])


def add(connection: Connection, sums: Mapping[Key, Table]) -> None:
    """Add to what is there. Whoever does so holds the runs' own rows until the transaction ends."""
    keys = sorted(sums)
    for first in range(0, len(keys), _AT_ONCE):
        some = keys[first : first + _AT_ONCE]
        known = _known(connection, some)
        rows = [(*key, _packed(added(known[key], sums[key]) if key in known else sums[key])) for key in some]
        sql, by_place = _putting(connection.dialect)
        values = rows if by_place else [dict(zip((*_KEY, "sums"), row, strict=True)) for row in rows]
        connection.exec_driver_sql(sql, values)


def read(
    connection: Connection, of: CTE, layouts: Iterable[tuple[str, wire.Layout]] = ()
) -> tuple[list[tuple[str, BucketRollup]], list[tuple[str, int, int]]]:
    """The sums of some sources.

    Args:
        connection: To the database.
        of: The sources.
        layouts: With their runs, for the buckets' sizes; one that none gives counts nothing.

    Returns:
        (run, sums) over all ranks by module, revision and bucket; and (run, rank, bytes of buckets reduced).
    """
    size_of = {
        (run, layout.module, layout.revision): np.array([bucket.size_bytes for bucket in layout.buckets], np.float64)
        for run, layout in layouts
    }
    c = schema.bucket_sums.c
    query = select(of.c.run_id, of.c.rank, c.module, c.revision, c.sums)
    query = query.join(schema.bucket_sums, (c.run_id == of.c.run_id) & (c.source == of.c.source))
    total: dict[tuple[str, int, int], Table] = {}
    reduced: dict[tuple[str, int], float] = {}
    for some in connection.execute(query).partitions(_AT_ONCE):
        for key, ranks, tables in _alike(some):
            found = tables.sum(axis=0)
            found[0] = tables[0, 0]
            total[key] = added(total[key], found) if key in total else found
            size_bytes = np.dot(tables[:, 1], _sizes(found[0], size_of.get(key)))
            for rank, reduced_bytes in zip(ranks, size_bytes.tolist(), strict=True):
                reduced[key[0], rank] = reduced.get((key[0], rank), 0.0) + reduced_bytes
    by_bucket = [
        (run, BucketRollup(module, revision, *map(int, row)))
        for (run, module, revision), found in sorted(total.items())
        for row in found.T.tolist()
    ]
    return by_bucket, [(run, rank, int(size_bytes)) for (run, rank), size_bytes in reduced.items()]


def _alike(rows: Iterable[Any]) -> Iterator[tuple[tuple[str, int, int], list[int], Tables]]:
    """Run, module and revision; the ranks; and the sums of all of them that have the same buckets."""
    found: dict[tuple[str, int, int, bytes], list[tuple[int, bytes]]] = {}
    for run, rank, module, revision, packed in rows:
        key = run, module, revision, packed[: len(packed) // (1 + len(SUMS))]
        found.setdefault(key, []).append((rank, packed))
    for (run, module, revision, _), told in found.items():
        tables = np.frombuffer(b"".join([packed for _, packed in told]), "<f8")
        yield (run, module, revision), [rank for rank, _ in told], tables.reshape(len(told), 1 + len(SUMS), -1)


def _sizes(bucket: Sizes, size_bytes: Sizes | None) -> Sizes:
    """Of these buckets, zero where it is not known."""
    found = np.zeros(len(bucket))
    if size_bytes is not None:
        known = bucket < len(size_bytes)
        found[known] = size_bytes[bucket[known].astype(np.int64)]
    return found


def _packed(found: Table) -> bytes:
    return found.astype("<f8", copy=False).tobytes()


def _unpacked(packed: bytes) -> Table:
    return np.frombuffer(packed, "<f8").reshape(1 + len(SUMS), -1)


def _known(connection: Connection, keys: list[Key]) -> dict[Key, Table]:
    values = {f"{name}_{place}": value for place, key in enumerate(keys) for name, value in zip(_KEY, key, strict=True)}
    sql, by_place = _finding(connection.dialect, len(keys))
    found = connection.exec_driver_sql(sql, tuple(values[name] for name in by_place) if by_place else values)
    return {(run, source, module, revision): _unpacked(packed) for run, source, module, revision, packed in found}


@cache
def _finding(dialect: Dialect, count: int) -> tuple[str, tuple[str, ...]]:
    """SQL that finds so many rows by their keys, and the order of its values, where they have no names."""
    c = schema.bucket_sums.c
    one = [and_(*(c[name] == bindparam(f"{name}_{place}") for name in _KEY)) for place in range(count)]
    return compiled(select(schema.bucket_sums).where(or_(*one)), dialect)


@cache
def _putting(dialect: Dialect) -> tuple[str, tuple[str, ...]]:
    """SQL that puts a row in the place of the one under its key; likewise."""
    statement = insert(dialect.name, schema.bucket_sums)
    put = statement.on_conflict_do_update(index_elements=_KEY, set_={"sums": statement.excluded.sums})
    return compiled(put, dialect)
