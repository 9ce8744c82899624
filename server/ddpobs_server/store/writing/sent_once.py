"""Each step counts once: a step of a rank is sent by one source, in one batch.

Sums are added to, so that a step under a second key would count twice. A process numbers its steps, and its batches, in
order. So a batch's steps lie between those of the batches before and after it, which are looked up by key, also for a
batch that waited in a spool. The same holds for the collectives that statistics over ranks cover.

A look-up passes over the batches without steps beside it, such as those of a hang: 0.3 us each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from sqlalchemy import Connection, TextClause, select, text

from ddpobs import wire
from ddpobs_server.store import schema

_KINDS = (("step", "steps"), ("collective", "peers"))
"""What is sent once: its name in the columns of `schema.batches`, and the field of a batch that has it."""


def extents(batch: wire.Batch) -> dict[str, int | None]:
    """First and last step of a batch's steps and spans, and collective of its peers; None without any."""
    columns = [c.step for c in (batch.steps, batch.spans) if c is not None and len(c)]
    windows = batch.peers
    return {
        "first_step": min((int(step.min()) for step in columns), default=None),
        "last_step": max((int(step.max()) for step in columns), default=None),
        "first_collective": min((window.first_collective for window in windows), default=None),
        "last_collective": max((window.last_collective for window in windows), default=None),
    }


def problem(connection: Connection, run: str, batches: Sequence[wire.Batch]) -> str | None:
    """What is wrong with the first batch of a run that sends anew what another batch or source sends; None without one.

    Args:
        connection: In a transaction that has inserted the batches, but not their sources, and locks the run's row.
        run: The run.
        batches: New batches.
    """
    return _repeat(connection, run, batches) or _second_source(connection, run, batches)


def _repeat(connection: Connection, run: str, batches: Sequence[wire.Batch]) -> str | None:
    for name, field in _KINDS:
        own = [(batch, extents(batch)) for batch in batches]
        own = [(batch, extent) for batch, extent in own if extent[f"first_{name}"] is not None]
        if not own:
            continue
        values: dict[str, Any] = {"run": run}
        for index, (batch, _) in enumerate(own):
            values |= {f"source_{index}": batch.source, f"seq_{index}": batch.seq}
        for index, before, after in sorted(connection.execute(_neighbours(name, len(own)), values).all()):
            first, last = own[index][1][f"first_{name}"], own[index][1][f"last_{name}"]
            if (before is not None and before >= first) or (after is not None and after <= last):
                bounds = [f"after {before}"] * (before is not None) + [f"before {after}"] * (after is not None)
                return (
                    f"{field}: expected {name}s {' and '.join(bounds)}, as this source's other batches have those, got "
                    f"{first} to {last}: a process sends each {name} once, in order"
                )
    return None


def _second_source(connection: Connection, run: str, batches: Iterable[wire.Batch]) -> str | None:
    c = schema.sources.c
    sources = {batch.source: (batch.attempt, batch.rank) for batch in batches}
    stored = connection.execute(select(c.source).where(c.run_id == run, c.source.in_(list(sources)))).scalars()
    for source in stored:
        del sources[source]
    owners: dict[tuple[str, int], str] = {}
    for attempt in sorted({attempt for attempt, _ in sources.values()}):
        ranks = [rank for own, rank in sources.values() if own == attempt]
        rows = connection.execute(
            select(c.rank, c.source).where(c.run_id == run, c.attempt == attempt, c.rank.in_(ranks))
        )
        owners |= {(attempt, rank): source for rank, source in rows}
    for source, key in sources.items():
        if (owner := owners.setdefault(key, source)) != source:
            return (
                f"source: expected {owner}, which sends rank {key[1]} of this attempt, got {source}: a rank of an "
                "attempt is one process"
            )
    return None


@cache
def _neighbours(name: str, count: int) -> TextClause:
    """A query of the last number in the batch before, and of the first in the one after, for each of `count` batches.

    Two seeks by primary key for each: batches without such data between two batches with some are rare.
    """
    same = f"FROM batches WHERE batches.run_id = :run AND source = :source_{{0}} AND last_{name} IS NOT NULL AND seq"
    before = f"SELECT last_{name} {same} < :seq_{{0}} ORDER BY seq DESC LIMIT 1"
    after = f"SELECT first_{name} {same} > :seq_{{0}} ORDER BY seq LIMIT 1"
    return text(" UNION ALL ".join(f"SELECT {{0}}, ({before}), ({after})".format(index) for index in range(count)))
