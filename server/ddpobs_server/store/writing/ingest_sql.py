"""Statements of the ingest, built once: inserts that claim batches, and inserts that update existing rows."""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import BindParameter, Dialect, Table, bindparam, case, func, or_, select, text

from ddpobs_server.store import endings, schema
from ddpobs_server.store.database.sql import compiled, insert


@cache
def attempts_sql(dialect: Dialect) -> tuple[str, tuple[str, ...]]:
    """SQL that reads a run's attempts with their ordinals, and its latest attempt."""
    c, r = schema.attempts.c, schema.runs.c
    run: BindParameter[str] = bindparam("run")
    query = select(c.attempt, c.ordinal, r.attempt).where(c.run_id == run, r.run_id == run)
    return compiled(query, dialect)


@cache
def claim(dialect: str) -> Any:
    """An insert of a batch, which returns its key if it is new."""
    c = schema.batches.c
    return insert(dialect, schema.batches).on_conflict_do_nothing().returning(c.run_id, c.source, c.seq)


@cache
def insert_if_new(dialect: str, table: Table) -> Any:
    """An insert that skips rows with an existing key."""
    return insert(dialect, table).on_conflict_do_nothing()


@cache
def run_upsert(dialect: str) -> Any:
    """An insert of a run, which updates an existing row."""
    statement, c = insert(dialect, schema.runs), schema.runs.c
    new = statement.excluded
    changes = {
        "last_seen_ns": new.last_seen_ns,  # Not the maximum: a clock that was ahead may be corrected.
        "commits": c.commits + new.commits,
        "chunk_bytes": c.chunk_bytes + new.chunk_bytes,
    }
    return statement.on_conflict_do_update(index_elements=["run_id"], set_=changes)


@cache
def source_upsert(dialect: str) -> Any:
    """An insert of a source, which updates an existing row of the same attempt and rank, and skips any other row."""
    statement, c = insert(dialect, schema.sources), schema.sources.c
    new = statement.excluded
    # A spooled batch arrives after newer batches.
    highest = ("emitted", "dropped", "last_step", "monotonic_ns")
    changes: dict[str, Any] = {name: greatest(dialect, c[name], new[name]) for name in highest}
    later = new.monotonic_ns >= c.monotonic_ns
    changes |= {
        name: case((later, func.coalesce(new[name], c[name])), else_=c[name])
        for name in ("wall_ns", "pulse", "account", "stuck_pulse")
    }
    changes["hello"] = func.coalesce(new.hello, c.hello)
    changes["last_seen_ns"] = new.last_seen_ns
    stepped_ns = func.nullif(new.last_step_seen_ns, text("0"))
    changes["last_step_seen_ns"] = func.coalesce(stepped_ns, c.last_step_seen_ns)
    changes["goodbye"] = or_(c.goodbye, new.goodbye)
    changes |= endings.latest_end(new)
    changes["stuck_ns"] = case((later & new.pulse.is_not(None), new.stuck_ns), else_=c.stuck_ns)
    same = (c.attempt == new.attempt) & (c.rank == new.rank)
    return statement.on_conflict_do_update(index_elements=["run_id", "source"], set_=changes, where=same)


@cache
def sum_upsert(dialect: str, table: Table) -> Any:
    """An insert of sums, which adds to an existing row."""
    statement = insert(dialect, table)
    sums = {column.name: column + statement.excluded[column.name] for column in table.columns if not column.primary_key}
    keys = [column.name for column in table.primary_key.columns]
    return statement.on_conflict_do_update(index_elements=keys, set_=sums)


def least(dialect: str, column: Any, value: Any) -> Any:
    """The smaller of two values."""
    return (func.min if dialect == "sqlite" else func.least)(column, value)


def greatest(dialect: str, column: Any, value: Any) -> Any:
    """The greater of two values."""
    return (func.max if dialect == "sqlite" else func.greatest)(column, value)
