"""Unused sets: their names within a budget of bytes, for diagnoses and responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, and_, func, or_, select

from ddpobs import wire
from ddpobs_server.store import schema
from ddpobs_server.store.selected_sources import SelectedSources

UNUSED_JUDGED = 8
"""Latest unused sets with names, and latest empty sets, that a diagnosis reads of each source and module. A module's
latest sets come first."""
NAMES_BYTES = 8_000_000
"""Maximum bytes of different lists of names that a read keeps. Most ranks send the same lists, kept once."""
_MAX_SETS = 200_000
"""Maximum number of unused sets that a read keeps."""
_GROUP = 16
"""Sets that a statement looks up: each may have 16 MB."""


class _Text(msgspec.Struct):
    """An unused set whose names are not decoded yet."""

    step: int
    module: int
    locally: msgspec.Raw
    globally: msgspec.Raw


class _Key(NamedTuple):
    run: str
    rank: int
    source: str
    seq: int
    position: int


class UnusedSets(NamedTuple):
    """(run, rank, unused set) in the order in which each rank sent them, and the number of sets that did not fit."""

    sets: list[tuple[str, int, wire.Unused]]
    left_out: int


_decode = msgspec.json.Decoder(_Text).decode
_decode_names = msgspec.json.Decoder(list[str]).decode


def latest(
    connection: Connection,
    sources: SelectedSources,
    *,
    module: int | None = None,
    limit: int = _MAX_SETS,
    each: int | None = None,
) -> UnusedSets:
    """The latest unused sets of all ranks.

    Args:
        connection: To the database.
        sources: The sources.
        module: Index of the only module to read; None for all.
        limit: Most sets.
        each: Most sets with names, and most empty sets, of each source and module; None for no such limit.

    Returns:
        As many sets as have `NAMES_BYTES` of names; the first always fits.
    """
    names = _Names(NAMES_BYTES)
    rows = []
    keys = _latest_keys(connection, sources, module, limit, each)
    for key, body in _bodies(connection, keys):
        if (record := names.decode(body)) is None:
            break
        rows.append((key, record))
    rows.sort(key=lambda row: (row[0].run, row[0].rank, row[0].seq, row[0].position))
    return UnusedSets([(key.run, key.rank, record) for key, record in rows], len(keys) - len(rows))


class _Names:
    """Decodes unused sets. Sets with the same names share their lists."""

    def __init__(self, limit_bytes: int) -> None:
        self._remaining = limit_bytes
        self._lists: dict[bytes, list[str]] = {}

    def decode(self, body: str) -> wire.Unused | None:
        """The set; None if its names do not fit."""
        text = _decode(body)
        raws = (bytes(text.locally), bytes(text.globally))
        new_bytes = sum(len(raw) for raw in set(raws) if raw not in self._lists)
        if new_bytes > self._remaining and self._lists:
            return None
        self._remaining -= new_bytes
        locally, globally = (self._lists.setdefault(raw, self._lists.get(raw) or _decode_names(raw)) for raw in raws)
        return wire.Unused(step=text.step, module=text.module, locally=locally, globally=globally)


def _latest_keys(
    connection: Connection, sources: SelectedSources, module: int | None, limit: int, each: int | None
) -> list[_Key]:
    """Keys of the sets, the latest of all ranks first. Reads the index alone."""
    c = schema.unused.c
    numbered = (
        select(sources.c.rank, c.run_id, c.source, c.seq, c.position, unused_number())
        .select_from(sources.cte)
        .join(*sources.joined(schema.unused))
        .where(*([] if module is None else [c.module == module]))
        .subquery()
        .c
    )
    query = select(numbered.run_id, numbered.rank, numbered.source, numbered.seq, numbered.position)
    if each is not None:
        query = query.where(numbered.number <= each)
    order = (numbered.number, numbered.rank, numbered.source, numbered.seq.desc(), numbered.position.desc())
    return [_Key(*row) for row in connection.execute(query.order_by(*order).limit(limit))]


def _bodies(connection: Connection, keys: Sequence[_Key]) -> Iterator[tuple[_Key, str]]:
    """The stored text of each set in this order; few texts are in memory at a time."""
    c = schema.unused.c
    for first in range(0, len(keys), _GROUP):
        group = keys[first : first + _GROUP]
        same = [
            and_(c.run_id == key.run, c.source == key.source, c.seq == key.seq, c.position == key.position)
            for key in group
        ]
        query = select(c.run_id, c.source, c.seq, c.position, c.body).where(or_(*same))
        texts = {tuple(row[:4]): row[4] for row in connection.execute(query)}
        for key in group:
            if (body := texts.get((key.run, key.source, key.seq, key.position))) is not None:
                yield key, body


def unused_number() -> Any:
    """Number of an unused set, 1 for the latest. Sets with names and empty sets of a source and module count apart."""
    c = schema.unused.c
    kind, newest = (c.run_id, c.source, c.module, c.names > 0), (c.seq.desc(), c.position.desc())
    return func.row_number().over(partition_by=kind, order_by=newest).label("number")
