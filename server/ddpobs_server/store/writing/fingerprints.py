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
from sqlalchemy import Connection, func, select, tuple_

from ddpobs import wire
from ddpobs_server.store import schema
from ddpobs_server.store.selected_sources import sources_of_attempt

KEPT = 64
"""Latest samples of each source and module that stay, besides the first."""
_MAX_BODY = 2**24
"""Maximum bytes of a body; `wire.checks` allows less."""
_MAX_BODIES = 64
"""Maximum number of different bodies of a sample that are read, the most frequent first."""
_READ_BYTES, _GROUP = 32_000_000, 2
"""Bytes of bodies after which a diagnosis reads no further ones, and bodies that a statement reads."""
_MAX_MODULES, _MAX_SAMPLES = 64, 100_000
"""Maximum number of modules whose fingerprints are read, and maximum number of samples whose digests are compared."""
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


def prune(connection: Connection, written: Sequence[dict[str, Any]]) -> Counter[str]:
    """Remove the samples of the written rows' sources but the first and the latest `KEPT` of each module.

    Returns:
        Bytes of the removed bodies, by run.
    """
    removed: Counter[str] = Counter()
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
            delete = schema.fingerprints.delete().where(*same, tuple_(*_KEY).in_(surplus))
            removed[run] += sum(connection.execute(delete.returning(func.length(_f.body))).scalars())
    return removed


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

    If no sample differs, the list is empty. Beyond `_READ_BYTES` of bodies, further ranks and modules are left out.
    """
    steps: dict[int, list[tuple[int, int]]] = {}
    for module, step, digests in _compared(connection, run, attempt):
        steps.setdefault(module, []).append((step, digests))
    result: list[tuple[int, wire.Fingerprint]] = []
    remaining, modules = _READ_BYTES, 0
    for module, samples in steps.items():
        first = next((index for index, (_, digests) in enumerate(samples) if digests > 1), None)
        if first is None:
            continue
        if remaining <= 0 or modules == _MAX_MODULES:
            break
        modules += 1
        of_module: list[tuple[int, wire.Fingerprint]] = []
        for step, _ in reversed(samples[max(0, first - 1) : first + 1]):  # The sample that differs needs room first.
            rows, size_bytes = _read(connection, run, attempt, (module, step), remaining)
            remaining -= size_bytes
            of_module = rows + of_module
        result += of_module
    return result


def _compared(connection: Connection, run: str, attempt: str) -> list[tuple[int, int, int]]:
    """(module, step, number of different digests) of the samples of two ranks or more, in order."""
    sources = sources_of_attempt(run, attempt)
    sample = (_f.module, _f.synchronised)
    query = (
        select(*sample, func.count(_f.digest.distinct()))
        .select_from(sources.cte)
        .join(*sources.joined(schema.fingerprints))
        .group_by(_f.run_id, *sample)
        .having(func.count(sources.c.rank.distinct()) > 1)
    )
    rows = connection.execute(query.order_by(*sample).limit(_MAX_SAMPLES))
    return [(module, step, digests) for module, step, digests in rows]


def _read(
    connection: Connection, run: str, attempt: str, sample: tuple[int, int], limit_bytes: int
) -> tuple[list[tuple[int, wire.Fingerprint]], int]:
    """The fingerprints of all ranks in one sample, a module and a step, and the bytes of their different bodies.

    Args:
        connection: To the database.
        run: The run.
        attempt: The attempt.
        sample: The module and the step.
        limit_bytes: Bytes after which ranks with further bodies are left out. The two most frequent bodies always fit.
    """
    sources = sources_of_attempt(run, attempt)
    module, step = sample
    query = select(sources.c.rank, _f.digest, *_KEY).select_from(sources.cte).join(*sources.joined(schema.fingerprints))
    query = query.where(_f.module == module, _f.synchronised == step)
    ranks = {rank: (bytes(digest), tuple(key)) for rank, digest, *key in connection.execute(query)}
    frequent = [digest for digest, _ in Counter(digest for digest, _ in ranks.values()).most_common(_MAX_BODIES)]
    keys = dict(ranks.values())  # One row of each digest.
    bodies: dict[bytes, wire.Fingerprint] = {}
    size_bytes = 0
    for begin in range(0, len(frequent), _GROUP):
        if begin and size_bytes >= limit_bytes:
            break
        distinct = tuple_(*_KEY).in_([keys[digest] for digest in frequent[begin : begin + _GROUP]])
        for digest, body in connection.execute(select(_f.digest, _f.body).where(_f.run_id == run, distinct)):
            packed = zstandard.decompress(bytes(body), _MAX_BODY)
            size_bytes += len(packed)
            bodies[bytes(digest)] = wire.unpack(packed, wire.Fingerprint)
    return [(rank, bodies[digest]) for rank, (digest, _) in sorted(ranks.items()) if digest in bodies], size_bytes
