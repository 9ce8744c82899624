"""The number of unused parameters of each run: distinct names over all ranks, counted by hashes.

An unused set never changes once it is stored, so its names are read and hashed once, and the hashes are cached. A read
of /metrics therefore reads the names of new sets alone.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Select, and_, func, or_, select

from ddpobs_server.store import schema
from ddpobs_server.store.selected_sources import SelectedSources

_GROUP = 16
"""Sets that a statement looks up: each may have 16 MB."""
_RUN_BYTES, _READ_BYTES = 32_000_000, 64_000_000
"""Bytes after which no further set of a run is read, and after which a read leaves the rest to the next one."""
_MAX_NAMES = 200_000
"""Sets with more names are not read: their number is all that counts."""
_CACHED_HASHES, _CACHED_SETS = 2_000_000, 100_000
"""Maximum number of hashes and sets in the cache."""
_Hashes = npt.NDArray[np.int64]


class _Key(NamedTuple):
    run: str
    source: str
    seq: int
    position: int


class _Set(NamedTuple):
    """The latest unused set of a source and module, and its number of names."""

    key: _Key
    module: int
    names: int


class _Hashed(NamedTuple):
    hashes: _Hashes
    size_bytes: int


class _Text(msgspec.Struct):
    """An unused set whose names are not decoded yet."""

    locally: msgspec.Raw


_decode = msgspec.json.Decoder(_Text).decode
_decode_names = msgspec.json.Decoder(list[str]).decode


class UnusedNames:
    """Counts the parameters without a gradient on some rank."""

    def __init__(self) -> None:
        self._cache: OrderedDict[_Key, _Hashed] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def counts(self, connection: Connection, sources: SelectedSources) -> dict[str, int]:
        """Parameters without a gradient on some rank, by run.

        If the names of all ranks are too many to be read, the count is the largest of those that are known: of the
        names that were read, and of each module's rank with the most.
        """
        by_run: dict[str, list[_Set]] = {}
        for *key, module, names in sources.execute(connection, _latest):
            by_run.setdefault(key[0], []).append(_Set(_Key(*key), module, int(names)))
        reader = _Reader(_READ_BYTES)
        return {run: _count(sets, self._hashes(connection, sets, reader)) for run, sets in by_run.items()}

    def _hashes(self, connection: Connection, sets: Sequence[_Set], reader: _Reader) -> dict[_Key, _Hashes]:
        """The hashes of a run's sets, of those that fit. Without the lock during reads: another scrape may go on."""
        named = [row.key for row in sets if 0 < row.names <= _MAX_NAMES]
        with self._lock:
            hashed = {key: self._cache[key] for key in named if key in self._cache}
            for key in hashed:
                self._cache.move_to_end(key)
        limit_bytes = _RUN_BYTES - sum(entry.size_bytes for entry in hashed.values())
        for key, entry in reader.read(connection, [key for key in named if key not in hashed], limit_bytes):
            hashed[key] = entry
            self._add(key, entry)
        return {key: entry.hashes for key, entry in hashed.items()}

    def _add(self, key: _Key, entry: _Hashed) -> None:
        with self._lock:
            if key not in self._cache:
                self._cache[key] = entry
                self._size += len(entry.hashes)
            while self._size > _CACHED_HASHES or len(self._cache) > _CACHED_SETS:
                self._size -= len(self._cache.popitem(last=False)[1].hashes)


class _Reader:
    """Reads and hashes sets up to a number of bytes. Sets with the same names, as most ranks have, share their hashes.

    Args:
        limit_bytes: The number of bytes, of all calls of `read`.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._remaining = limit_bytes
        self._known: dict[bytes, _Hashes] = {}

    def read(self, connection: Connection, keys: Sequence[_Key], limit_bytes: int) -> Iterator[tuple[_Key, _Hashed]]:
        """Sets up to `limit_bytes`."""
        for key, body in _bodies(connection, keys) if min(limit_bytes, self._remaining) > 0 else ():
            limit_bytes, self._remaining = limit_bytes - len(body), self._remaining - len(body)
            text = bytes(_decode(body).locally)
            if text not in self._known:
                self._known[text] = np.unique(np.fromiter(map(hash, _decode_names(text)), np.int64))
            yield key, _Hashed(self._known[text], len(body))
            if min(limit_bytes, self._remaining) <= 0:
                return


def _count(sets: Sequence[_Set], hashes: Mapping[_Key, _Hashes]) -> int:
    """Distinct names of each module over the ranks, at least as many as its longest set has."""
    longest: Counter[int] = Counter()
    by_module: dict[int, dict[int, _Hashes]] = {}
    for row in sets:
        longest[row.module] = max(longest[row.module], row.names)
        if (counted := hashes.get(row.key)) is not None:
            by_module.setdefault(row.module, {})[id(counted)] = counted
    distinct = {module: len(np.unique(np.concatenate([*own.values()]))) for module, own in by_module.items()}
    return sum(max(most, distinct.get(module, 0)) for module, most in longest.items())


def _latest(sources: SelectedSources) -> Select[Any]:
    """The latest set of each source and module. Reads the index alone."""
    c = schema.unused.c
    order = (c.seq.desc(), c.position.desc())
    number = func.row_number().over(partition_by=(c.run_id, c.source, c.module), order_by=order).label("number")
    latest = (
        select(c.run_id, c.source, c.seq, c.position, c.module, c.names, number)
        .select_from(sources.cte)
        .join(*sources.joined(schema.unused))
        .subquery()
        .c
    )
    columns = (latest.run_id, latest.source, latest.seq, latest.position, latest.module, latest.names)
    return select(*columns).where(latest.number == 1).order_by(*columns[:4])


def _bodies(connection: Connection, keys: Sequence[_Key]) -> Iterator[tuple[_Key, str]]:
    """The stored text of each set; few texts are in memory at a time."""
    c = schema.unused.c
    for first in range(0, len(keys), _GROUP):
        same = [
            and_(c.run_id == run, c.source == source, c.seq == seq, c.position == position)
            for run, source, seq, position in keys[first : first + _GROUP]
        ]
        query = select(c.run_id, c.source, c.seq, c.position, c.body).where(or_(*same))
        for row in connection.execute(query.execution_options(yield_per=2)):
            yield _Key(*row[:4]), row[4]
