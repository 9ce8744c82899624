"""Findings that were sent to the webhook. One of several collectors claims a finding before it sends it."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, select

from ddpobs_server.store import schema
from ddpobs_server.store.database.sql import insert

_n = schema.notifications.c


class NotificationKey(NamedTuple):
    """What is sent once: the findings of a code and a severity in an attempt."""

    run: str
    attempt: str
    code: str
    severity: str


def sent(connection: Connection, run: str, attempt: str) -> set[NotificationKey]:
    """Return what was sent about an attempt."""
    query = select(_n.code, _n.severity).where(_n.run_id == run, _n.attempt == attempt, _n.sent_ns > 0)
    return {NotificationKey(run, attempt, *row) for row in connection.execute(query)}


def claim(connection: Connection, key: NotificationKey, now_ns: int, lease_ns: int) -> bool:
    """Claim to send findings; False if they were sent, or claimed within `lease_ns`, or if the run is gone."""
    if connection.execute(select(schema.runs.c.attempt).where(schema.runs.c.run_id == key.run)).first() is None:
        return False
    statement = insert(connection.dialect.name, schema.notifications)
    claimed = statement.on_conflict_do_update(
        index_elements=["run_id", "attempt", "code", "severity"],
        set_={"claimed_ns": statement.excluded.claimed_ns},
        where=(_n.sent_ns == 0) & (_n.claimed_ns <= now_ns - lease_ns),
    )
    run, attempt, code, severity = key
    row = {"run_id": run, "attempt": attempt, "code": code, "severity": severity, "claimed_ns": now_ns, "sent_ns": 0}
    return connection.execute(claimed.returning(_n.run_id), row).first() is not None


def release(connection: Connection, key: NotificationKey) -> None:
    """Let any collector claim the findings."""
    connection.execute(schema.notifications.delete().where(*_is(key), _n.sent_ns == 0))


def mark_sent(connection: Connection, key: NotificationKey, now_ns: int) -> None:
    """Record that the findings were sent."""
    connection.execute(schema.notifications.update().where(*_is(key)).values(sent_ns=now_ns))


def _is(key: NotificationKey) -> list[ColumnElement[bool]]:
    return [_n.run_id == key.run, _n.attempt == key.attempt, _n.code == key.code, _n.severity == key.severity]
