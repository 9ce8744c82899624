"""Tags and notes that people gave to runs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import Connection

from ddpobs_server.store import schema
from ddpobs_server.store.queries.audit_queries import add_entry
from ddpobs_server.store.rows import AuditEntry


def set_labels(
    connection: Connection,
    run: str,
    tags: Sequence[str] | None,
    note: str | None,
    entry: AuditEntry | None = None,
) -> bool:
    """Replace the tags and the note of a run; False if there is no such run.

    Args:
        connection: In a transaction.
        run: The run.
        tags: Tags in order; None leaves them.
        note: The note; None leaves it.
        entry: Entry of the audit log for the change; None for none.
    """
    values: dict[str, str] = {}
    if tags is not None:
        values["tags"] = msgspec.json.encode(list(tags)).decode()
    if note is not None:
        values["note"] = note
    c = schema.runs.c
    statement = schema.runs.update().where(c.run_id == run)
    changed = bool(connection.execute(statement.values(values or {"run_id": c.run_id})).rowcount)
    add_entry(connection, entry if changed else None)
    return changed


def decoded_tags(text: str | None) -> tuple[str, ...] | None:
    """Return stored tags; None if they were never set."""
    return None if text is None else msgspec.json.decode(text, type=tuple[str, ...])
