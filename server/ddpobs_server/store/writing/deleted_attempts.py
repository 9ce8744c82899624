"""Attempts of deleted runs: recorded at the deletion, read when a batch begins an attempt."""

from __future__ import annotations

from sqlalchemy import Connection, select

from ddpobs_server.store import schema
from ddpobs_server.store.database.sql import insert

_d, _a = schema.deleted_attempts.c, schema.attempts.c


def remember(connection: Connection, run: str, now_ns: int) -> None:
    """Record the stored attempts of a run that is about to lose its rows."""
    attempts = connection.execute(select(_a.attempt).where(_a.run_id == run)).scalars().all()
    if attempts:
        rows = [{"run_id": run, "attempt": attempt, "deleted_ns": now_ns} for attempt in attempts]
        statement = insert(connection.dialect.name, schema.deleted_attempts).on_conflict_do_nothing()
        connection.execute(statement, rows)


def contains(connection: Connection, run: str, attempt: str) -> bool:
    """Whether the attempt's run was deleted."""
    query = select(_d.deleted_ns).where(_d.run_id == run, _d.attempt == attempt)
    return connection.execute(query).first() is not None


def forget(connection: Connection, before_ns: int) -> None:
    """Remove the records of deletions before a time."""
    connection.execute(schema.deleted_attempts.delete().where(_d.deleted_ns < before_ns))
