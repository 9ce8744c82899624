"""The audit log: who changed what, and when. Each workspace keeps its latest entries."""

from __future__ import annotations

import secrets

import msgspec
from sqlalchemy import Connection, select

from ddpobs_server.store import schema
from ddpobs_server.store.rows import AuditEntry

_c = schema.audit_log.c


def add_entry(connection: Connection, entry: AuditEntry | None) -> None:
    """Store an entry in the transaction of its change; None is ignored."""
    if entry is not None:
        row = vars(entry) | {
            "entry_id": f"{entry.at_ns:016x}{secrets.token_hex(4)}",
            "identity": entry.identity[:128],
            "peer": entry.peer[:255],
            "detail": msgspec.json.encode(entry.detail).decode(),
        }
        connection.execute(schema.audit_log.insert(), row)


def entries(
    connection: Connection, limit: int, workspace: str | None = None, before: str | None = None
) -> list[AuditEntry]:
    """Return entries, newest first.

    Args:
        connection: To the database.
        limit: Maximum number of entries.
        workspace: Workspace of the subjects; None for all.
        before: Id of an entry; only older ones. None for no bound.
    """
    query = select(schema.audit_log).order_by(_c.entry_id.desc()).limit(limit)
    if workspace is not None:
        query = query.where(_c.workspace == workspace)
    if before is not None:
        query = query.where(_c.entry_id < before)
    rows = connection.execute(query).all()
    return [AuditEntry(**{**row._mapping, "detail": msgspec.json.decode(row.detail)}) for row in rows]


def prune(connection: Connection, kept: int) -> int:
    """Remove all but the latest entries of each workspace. Returns the number of removed entries.

    Args:
        connection: In a transaction.
        kept: Number of entries that a workspace keeps: another workspace's changes remove none of them.
    """
    removed = 0
    for workspace in connection.execute(select(_c.workspace).distinct()).scalars().all():
        own = _c.workspace == workspace
        latest = select(_c.entry_id).where(own).order_by(_c.entry_id.desc())
        if (last_kept := connection.execute(latest.offset(kept - 1).limit(1)).scalar()) is not None:
            removed += connection.execute(schema.audit_log.delete().where(own, _c.entry_id < last_kept)).rowcount
    return removed
