"""Entries of the audit log for changes by requests."""

from __future__ import annotations

import time
from typing import Any

from fastapi import Request

from ddpobs_server.store import AuditAction, AuditEntry
from ddpobs_server.web.authenticator import Caller


def entry_of(
    request: Request, caller: Caller, action: AuditAction, subject: str, detail: dict[str, Any] | None = None
) -> AuditEntry:
    """Return the entry of a change that a request makes in the caller's workspace."""
    return AuditEntry(
        action=action,
        subject=subject,
        workspace=caller.workspace,
        kind=caller.kind,
        identity=caller.name,
        token_id=caller.token_id,
        peer=request.client.host if request.client else "unknown",
        detail=detail or {},
        at_ns=time.time_ns(),
    )
