"""Small chunks joined to large ones: a flush every two seconds is few rows, which pack badly and are slow to read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from sqlalchemy import Engine, Row, bindparam, case, func, select

from ddpobs import wire
from ddpobs_server.store import chunks, schema

_ROWS, _CHUNKS = 4096, 256
"""Chunks of fewer rows are small, and are joined until they have as many, or until so many of them are."""


def compact(engine: Engine, run: str) -> Iterator[int]:
    """Join a run's small chunks, each row once; those that do not yet make a large one wait.

    Yields:
        How many went, each time some were joined: whoever asks may rest there.
    """
    c = schema.chunks.c
    small = (c.run_id == run, c.rows < _ROWS)
    # Those of one source are joined by themselves, those of many ranks with each other.
    alike = (c.attempt, c.kind, c.rank, case((c.rank == wire.UNKNOWN, ""), else_=c.source))
    enough = (func.sum(c.rows) >= _ROWS) | (func.count() >= _CHUNKS)
    with engine.connect() as connection:
        query = select(*alike).where(*small, c.kind.in_(chunks.RECORDS)).group_by(*alike).having(enough)
        groups = connection.execute(query).all()
    # Group by group: a run of a thousand ranks has tens of thousands of small chunks.
    for attempt, kind, rank, source in groups:
        of_group = (c.source == source,) if source else (c.attempt == attempt, c.rank == rank)
        query = select(c.attempt, c.kind, c.rank, c.source, c.seq, c.rows).where(*small, c.kind == kind, *of_group)
        with engine.connect() as connection:
            found = connection.execute(query.order_by(c.first_step, c.source, c.seq)).all()
        for part in _parts(found):
            yield _join(engine, run, part)


def _parts(small: Iterable[Row[*tuple[Any, ...]]]) -> Iterator[Sequence[Row[*tuple[Any, ...]]]]:
    """Chunks that make a large one together."""
    part: list[Row[*tuple[Any, ...]]] = []
    for chunk in small:
        part.append(chunk)
        if sum(one.rows for one in part) >= _ROWS or len(part) == _CHUNKS:
            yield part
            part = []


def _join(engine: Engine, run: str, part: Sequence[Row[*tuple[Any, ...]]]) -> int:
    """Put one chunk into the place of several, under the last one's key; 0 where they are no longer all there."""
    c, runs = schema.chunks.c, schema.runs.c
    kind, rank = part[0].kind, part[0].rank
    sources, seqs = {one.source for one in part}, {one.seq for one in part}
    with engine.connect() as connection:
        # A list of pairs would be looked for in all of the run; what comes of two lists beside them is passed by.
        query = select(c.source, c.seq, c.rows, c.payload).where(
            c.run_id == run, c.source.in_(sources), c.kind == kind, c.seq.in_(seqs)
        )
        found = {(row.source, row.seq): row for row in connection.execute(query)}
    keys = [(one.source, one.seq) for one in part]
    if not found.keys() >= set(keys):
        return 0
    read = [found[key] for key in keys]
    rows, step = _joined(kind, rank, [one.payload for one in read])
    row = chunks.row((run, *keys[-1]), attempt=part[0].attempt, kind=kind, rank=rank, step=step, payload=rows)
    with engine.connect() as connection:
        saved = sum(len(one.payload) for one in read) - len(rows)
        less = schema.runs.update().where(runs.run_id == run).values(chunk_bytes=runs.chunk_bytes - saved)
        connection.execute(less)  # The run's own row first, as whoever deletes it does.
        # Under a key that another collector joined some to there are more rows than were read.
        one = schema.chunks.delete().where(
            c.run_id == run,
            c.source == bindparam("of"),
            c.kind == kind,
            c.seq == bindparam("number"),
            c.rows == bindparam("held"),
        )
        these = [{"of": row.source, "number": row.seq, "held": row.rows} for row in read]
        gone = connection.execute(one, these).rowcount
        if gone != len(part):
            connection.rollback()  # Another collector was faster, or the run was deleted.
            return 0
        connection.execute(schema.chunks.insert(), row)
        connection.commit()
    return len(part) - 1


def _joined(kind: str, rank: int, payloads: Sequence[bytes]) -> tuple[bytes, wire.Ints]:
    """The payload of all rows, and their steps."""
    parts = [chunks.unpack(kind, rank, payload) for payload in payloads]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return chunks.pack(joined.pop("rank"), chunks.RECORDS[kind](**joined)), joined["step"]
