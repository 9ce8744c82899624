"""Fingerprints of replicas: written a row each, compared by their digests, and read only where they differ.

Equal fingerprints have equal digests. A diagnosis compares the digests of all ranks, and reads the bodies of the first
sample that differs, and of the last one before it. It reads each distinct body once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import zstandard
from sqlalchemy import CTE, Connection, func, select, tuple_

from ddpobs import wire
from ddpobs_server.store import schema
from ddpobs_server.store.aggregate_queries import sources_of_attempt

KEPT = 64
"""Latest samples of each source and module that stay, besides the first."""
_MAX_BODY = 2**24
"""Most bytes of a body; `wire.checks` allows less."""
_MAX_BODIES = 64
"""Most different bodies of a sample that are read, the most frequent first."""
_f = schema.fingerprints.c
_KEY = (_f.source, _f.seq, _f.position)


def rows(batch: wire.Batch) -> list[dict[str, Any]]:
    """Rows of the table for the batch's fingerprints."""
    result = []
    for position, sample in enumerate(batch.fingerprints):
        packed = wire.pack(sample)
        result.append(
            {
                "run_id": batch.run,
                "source": batch.source,
                "seq": batch.seq,
                "position": position,
                "module": sample.module,
                "synchronised": sample.synchronised,
                "digest": blake2b(packed, digest_size=16).digest(),
                "body": zstandard.compress(packed, 3),
            }
        )
    return result


def prune(connection: Connection, written: Sequence[dict[str, Any]]) -> None:
    """Remove the samples of the written rows' sources but the first and the latest `KEPT` of each module."""
    sources: dict[str, set[str]] = {}
    for row in written:
        sources.setdefault(row["run_id"], set()).add(row["source"])
    for run, names in sorted(sources.items()):
        many = select(_f.source).where(_f.run_id == run, _f.source.in_(sorted(names)))
        many = many.group_by(_f.source, _f.module).having(func.count() > KEPT + 1)
        for source in sorted(set(connection.execute(many).scalars())):
            same = (_f.run_id == run, _f.source == source)
            n = select(*_KEY, *sample_numbers()).where(*same).subquery().c
            surplus = select(n.source, n.seq, n.position).where(n.number > KEPT, n.first > 1)
            connection.execute(schema.fingerprints.delete().where(*same, tuple_(*_KEY).in_(surplus)))


def sample_numbers() -> tuple[Any, Any]:
    """SQL: place of a sample among those of its source and module: `number` from the last, `first` from the first."""
    same = (_f.run_id, _f.source, _f.module)
    latest = (_f.synchronised.desc(), _f.seq.desc(), _f.position.desc())
    first = (_f.synchronised, _f.seq, _f.position)
    return (
        func.row_number().over(partition_by=same, order_by=latest).label("number"),
        func.row_number().over(partition_by=same, order_by=first).label("first"),
    )


def differing(connection: Connection, run: str, attempt: str) -> list[tuple[int, wire.Fingerprint]]:
    """(rank, fingerprint) of each module's first sample in which ranks differ, and of the last one before it.

    If no sample differs, the list is empty.
    """
    steps: dict[int, list[tuple[int, int]]] = {}
    for module, step, digests in _compared(connection, run, attempt):
        steps.setdefault(module, []).append((step, digests))
    result = []
    for module, samples in steps.items():
        first = next((index for index, (_, digests) in enumerate(samples) if digests > 1), None)
        if first is not None:
            for step, _ in samples[max(0, first - 1) : first + 1]:
                result += _read(connection, run, attempt, module, step)
    return result


def _compared(connection: Connection, run: str, attempt: str) -> list[tuple[int, int, int]]:
    """(module, step, number of different digests) of the samples of two ranks or more, in order."""
    sources = sources_of_attempt(run, attempt)
    sample = (_f.module, _f.synchronised)
    query = (
        select(*sample, func.count(_f.digest.distinct()))
        .join(sources, _of(sources))
        .where(_f.run_id == run)
        .group_by(_f.run_id, *sample)
        .having(func.count(sources.c.rank.distinct()) > 1)
    )
    return [(module, step, digests) for module, step, digests in connection.execute(query.order_by(*sample))]


def _read(connection: Connection, run: str, attempt: str, module: int, step: int) -> list[tuple[int, wire.Fingerprint]]:
    """The fingerprints of all ranks in one sample."""
    sources = sources_of_attempt(run, attempt)
    wanted = (_f.run_id == run, _f.module == module, _f.synchronised == step)
    query = select(sources.c.rank, _f.digest, *_KEY).join(sources, _of(sources)).where(*wanted)
    ranks = {rank: (bytes(digest), tuple(key)) for rank, digest, *key in connection.execute(query)}
    frequent = Counter(digest for digest, _ in ranks.values()).most_common(_MAX_BODIES)
    keys = dict(ranks.values())  # One row of each digest.
    distinct = tuple_(*_KEY).in_([keys[digest] for digest, _ in frequent])
    rows = connection.execute(select(_f.digest, _f.body).where(_f.run_id == run, distinct))
    bodies = {bytes(digest): _unpacked(bytes(body)) for digest, body in rows}
    return [(rank, bodies[digest]) for rank, (digest, _) in sorted(ranks.items()) if digest in bodies]


def _of(sources: CTE) -> Any:
    return (sources.c.run_id == _f.run_id) & (sources.c.source == _f.source)


def _unpacked(body: bytes) -> wire.Fingerprint:
    return wire.unpack(zstandard.decompress(body, _MAX_BODY), wire.Fingerprint)
