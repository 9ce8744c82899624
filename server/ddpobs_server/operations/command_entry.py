"""Entries of the audit log for changes that nobody requests over HTTP, and entries as text."""

from __future__ import annotations

import getpass
import os
import socket
import time
from typing import Any

from ddpobs_server.store import AuditAction, AuditEntry


def command_entry(action: AuditAction, subject: str, workspace: str, detail: dict[str, Any]) -> AuditEntry:
    """Return the entry of a change by a command: its identity is the user of this machine, who used sudo or not."""
    return AuditEntry(
        action=action,
        subject=subject,
        workspace=workspace,
        kind="command",
        identity=os.environ.get("SUDO_USER") or _user(),
        token_id="",
        peer=socket.gethostname(),
        detail=detail,
        at_ns=time.time_ns(),
    )


def caller_text(entry: AuditEntry) -> str:
    """Return who made a change, in words: `token ci (1a2b3c4d) from 10.0.0.7`."""
    token = f" ({entry.token_id})" if entry.token_id else ""
    return f"{' '.join(filter(None, (entry.kind, entry.identity)))}{token} from {entry.peer}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # A container's user may have no name.
        return f"uid {os.getuid()}"
