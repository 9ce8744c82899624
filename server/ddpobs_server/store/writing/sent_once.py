"""Each step counts once: a step of a rank is sent by one source, in one batch.

Sums are added to, so that a step under a second key would count twice. A process numbers its steps, and its batches, in
order. So a batch's steps lie between those of the batches before and after it, which are looked up by key, also for a
batch that waited in a spool. The same holds for the collectives that statistics over ranks cover.

A look-up passes over the batches without steps beside it, such as those of a hang: 0.3 us each.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

from sqlalchemy import Connection, Dialect, select, text

from ddpobs import wire
from ddpobs_server.store import schema
from ddpobs_server.store.database.sql import compiled, execute_one

_KINDS = (("step", "steps"), ("collective", "peers"))
"""What is sent once: its name in the columns of `schema.batches`, and the field of a batch that has it."""
Extents = dict[str, int | None]
"""First and last number of each of `_KINDS`, by the name of the column."""
_Sent = tuple[wire.Batch, Extents]
"""A batch with steps or collectives, and its extents."""


def extents(batch: wire.Batch, step_ends: Collection[tuple[int, int]]) -> Extents:
    """First and last step of a batch's steps and spans, and collective of its peers; None without any.

    Args:
        batch: The batch.
        step_ends: First and last step of its steps and of its spans.
    """
    windows = batch.peers
    return {
        "first_step": min((first for first, _ in step_ends), default=None),
        "last_step": max((last for _, last in step_ends), default=None),
        "first_collective": min((window.first_collective for window in windows), default=None),
        "last_collective": max((window.last_collective for window in windows), default=None),
    }


def problem(connection: Connection, run: str, batches: Sequence[_Sent]) -> str | None:
    """What is wrong with the first batch of a run that sends anew what another batch or source sends; None without one.

    Args:
        connection: In a transaction that has inserted the batches, but not their sources, and locks the run's row.
        run: The run.
        batches: New batches, with their extents.
    """
    sent = [(batch, extent) for batch, extent in batches if any(value is not None for value in extent.values())]
    return _repeat(connection, run, sent) or _second_source(connection, run, sent)


def _repeat(connection: Connection, run: str, sent: Sequence[_Sent]) -> str | None:
    for name, field in _KINDS:
        own = [(batch, extent) for batch, extent in sent if extent[f"first_{name}"] is not None]
        if not own:
            continue
        values: dict[str, Any] = {"run": run}
        for index, (batch, _) in enumerate(own):
            values[f"source_{index}"], values[f"seq_{index}"] = batch.source, batch.seq
        rows = _execute(connection, _neighbours(connection.dialect, name, len(own)), values)
        for index, before, after in sorted(rows):
            first, last = own[index][1][f"first_{name}"], own[index][1][f"last_{name}"]
            if (before is not None and before >= first) or (after is not None and after <= last):
                bounds = [f"after {before}"] * (before is not None) + [f"before {after}"] * (after is not None)
                return (
                    f"{field}: expected {name}s {' and '.join(bounds)}, as this source's other batches have those, got "
                    f"{first} to {last}: a process sends each {name} once, in order"
                )
    return None


def _second_source(connection: Connection, run: str, sent: Sequence[_Sent]) -> str | None:
    sources: dict[tuple[str, int], str] = {}
    for batch, _ in sent:
        if (other := sources.setdefault((batch.attempt, batch.rank), batch.source)) != batch.source:
            return _of_two(other, batch.source, batch.rank)
    for attempt in sorted({attempt for attempt, _ in sources}):
        ranks = [rank for own, rank in sources if own == attempt]
        values = {"run": run, "attempt": attempt} | {f"rank_{index}": rank for index, rank in enumerate(ranks)}
        for rank, other in _execute(connection, _sources_of(connection.dialect, len(ranks)), values):
            own = sources[attempt, rank]
            if other != own and _has_sent(connection, run, other):
                return _of_two(other, own, rank)
    return None


def _has_sent(connection: Connection, run: str, source: str) -> bool:
    """Whether a source has sent steps or collectives; a process that failed at its start has not."""
    c = schema.batches.c
    has_any = c.first_step.is_not(None) | c.first_collective.is_not(None)
    query = select(c.seq).where(c.run_id == run, c.source == source, has_any).limit(1)
    return connection.execute(query).first() is not None


def _of_two(first: str, second: str, rank: int) -> str:
    return (
        f"source: expected {first}, which sends the steps of rank {rank} of this attempt, got {second}: a rank of an "
        "attempt is one process"
    )


def _execute(connection: Connection, compiled_sql: tuple[str, tuple[str, ...]], values: dict[str, Any]) -> list[Any]:
    sql, order = compiled_sql
    return execute_one(connection, sql, [values[name] for name in order])


@cache
def _sources_of(dialect: Dialect, count: int) -> tuple[str, tuple[str, ...]]:
    """SQL of the sources of `count` ranks of an attempt, and the order of its parameters."""
    ranks = ", ".join(f":rank_{index}" for index in range(count))
    query = f"SELECT rank, source FROM sources WHERE sources.run_id = :run AND attempt = :attempt AND rank IN ({ranks})"
    return compiled(text(query), dialect)


@cache
def _neighbours(dialect: Dialect, name: str, count: int) -> tuple[str, tuple[str, ...]]:
    """SQL of the last number in the batch before, and of the first in the one after, for each of `count` batches.

    Two seeks by primary key for each: batches without such data between two batches with some are rare.
    """
    same = f"FROM batches WHERE batches.run_id = :run AND source = :source_{{0}} AND last_{name} IS NOT NULL AND seq"
    before = f"SELECT last_{name} {same} < :seq_{{0}} ORDER BY seq DESC LIMIT 1"
    after = f"SELECT first_{name} {same} > :seq_{{0}} ORDER BY seq LIMIT 1"
    parts = (f"SELECT {{0}}, ({before}), ({after})".format(index) for index in range(count))
    return compiled(text(" UNION ALL ".join(parts)), dialect)
