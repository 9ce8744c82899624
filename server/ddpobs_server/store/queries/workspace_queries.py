"""Limits and usage of workspaces."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Connection, func, select

from ddpobs_server.store import schema
from ddpobs_server.store.database.sql import insert
from ddpobs_server.store.queries.audit_queries import add_entry
from ddpobs_server.store.rows import AuditEntry, WorkspaceUsage


def stored_limits(connection: Connection) -> dict[str, dict[str, Any]]:
    """Limits that differ from the settings, by workspace."""
    rows = connection.execute(select(schema.workspaces.c.workspace, schema.workspaces.c.limits))
    return {workspace: msgspec.json.decode(limits) for workspace, limits in rows}


def store_limits(
    connection: Connection, workspace: str, limits: dict[str, Any], entry: AuditEntry | None = None
) -> None:
    """Replace the stored limits of a workspace, with an entry of the audit log."""
    statement = insert(connection.dialect.name, schema.workspaces)
    upsert = statement.on_conflict_do_update(index_elements=["workspace"], set_={"limits": statement.excluded.limits})
    connection.execute(upsert, {"workspace": workspace, "limits": msgspec.json.encode(limits).decode()})
    add_entry(connection, entry)


def usage(connection: Connection) -> dict[str, WorkspaceUsage]:
    """Runs and bytes of each workspace that has runs."""
    c = schema.runs.c
    size = func.coalesce(func.sum(c.chunk_bytes + c.record_bytes), 0)
    rows = connection.execute(select(c.workspace, func.count(), size).group_by(c.workspace))
    return {workspace: WorkspaceUsage(int(runs), int(size_bytes)) for workspace, runs, size_bytes in rows}


def latest_attempt(connection: Connection, run: str) -> str | None:
    """The attempt that a run shows; None without the run."""
    return connection.execute(select(schema.runs.c.attempt).where(schema.runs.c.run_id == run)).scalar()


def attempt_ranks(connection: Connection, run: str, attempt: str) -> set[int]:
    """Ranks that have a source in the attempt, or of which a rank has reported delays."""
    s, p = schema.sources.c, schema.peer_totals.c
    of_attempt = (s.run_id == run) & (s.attempt == attempt)
    ranks = connection.execute(select(s.rank).where(of_attempt).distinct()).scalars().all()
    described = select(p.rank).join(schema.sources, p.source == s.source).where(p.run_id == run, of_attempt).distinct()
    return {int(rank) for rank in [*ranks, *connection.execute(described).scalars()]}
