"""The route of the audit log."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from typing_extensions import TypedDict

from ddpobs_server.api.concurrency import ConcurrencyLimitedRoute
from ddpobs_server.api.deps import Admin, StoreDep
from ddpobs_server.api.fields import doc
from ddpobs_server.store import DEFAULT_WORKSPACE, AuditAction, CallerKind

router = APIRouter(prefix="/api/v1", tags=["workspaces"], route_class=ConcurrencyLimitedRoute)


class AuditEntryResponse(TypedDict):
    """A change, and who made it."""

    at_ns: Annotated[int, doc("Time of the change by the collector's clock, as Unix time, in nanoseconds.")]
    workspace: Annotated[str, doc("Workspace of the subject.")]
    action: Annotated[AuditAction, doc("Kind of the change.")]
    subject: Annotated[str, doc("Name of the run or the workspace, or id of the token.")]
    kind: Annotated[
        CallerKind,
        doc("How the caller is known: `command` is a user of the collector's machine, `signal` a reload by SIGHUP."),
    ]
    identity: Annotated[str, doc("The person, owner of the token, or user of the machine; empty if it is not known.")]
    token_id: Annotated[str, doc("Id of the caller's token; empty for none.")]
    peer: Annotated[str, doc("Address of the client, or name of the machine.")]
    detail: Annotated[dict[str, str | int | float | bool | list[str] | None], doc("New values by name.")]


class AuditPage(TypedDict):
    """Entries, newest first."""

    entries: Annotated[list[AuditEntryResponse], doc("The entries, newest first.")]
    next: Annotated[str | None, doc("Where the next page begins; null at the end.")]


@router.get("/audit")
def get_audit_log(
    caller: Admin,
    store: StoreDep,
    limit: Annotated[int, Query(ge=1, le=500, description="Most entries of a page.")] = 50,
    cursor: Annotated[str | None, Query(pattern="^[0-9a-f]{24}$", description="`next` of the page before.")] = None,
) -> AuditPage:
    """Who deleted runs and changed labels, tokens, limits and settings, newest first.

    It has the changes in the caller's workspace; those in all workspaces for a caller of the default one.
    """
    workspace = None if caller.workspace == DEFAULT_WORKSPACE else caller.workspace
    entries = store.audit_entries(limit, workspace, cursor)
    return {
        "entries": [
            {
                "at_ns": entry.at_ns,
                "workspace": entry.workspace,
                "action": entry.action,
                "subject": entry.subject,
                "kind": entry.kind,
                "identity": entry.identity,
                "token_id": entry.token_id,
                "peer": entry.peer,
                "detail": entry.detail,
            }
            for entry in entries
        ],
        "next": entries[-1].entry_id if len(entries) == limit else None,
    }
