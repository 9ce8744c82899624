"""Messages to the webhook: one JSON form, and Slack's; signed as Standard Webhooks describes it.

Source of headers and signature: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import msgspec

from ddpobs.shared.words import finding_heading, finding_lines
from ddpobs_server.settings import Settings, webhook_key
from ddpobs_server.store import NotificationKey

_MAX_FINDINGS = 10
"""Findings of a code and a severity in a message."""
_PARTS = (
    "code",
    "severity",
    "title",
    "verdict",
    "measure",
    "when",
    "cause",
    "where",
    "remedy",
    "ranks",
    "phase",
    "steps",
)


@dataclass(frozen=True)
class Message:
    """Findings of a code and a severity in an attempt, ready to send.

    Attributes:
        key: What the message is about.
        message_id: The same in each attempt to send it, so that a receiver recognises repetitions.
        body: JSON.
    """

    key: NotificationKey
    message_id: str
    body: bytes


def message_of(
    key: NotificationKey, workspace: str, findings: Sequence[Mapping[str, Any]], settings: Settings, now_ns: int
) -> Message:
    """Return the message about findings, in the settings' form.

    Args:
        key: Run, attempt, code and severity of all of these findings.
        workspace: The run's workspace.
        findings: As in the REST API, at least one.
        settings: `webhook_form` and `public_url`.
        now_ns: Unix time in ns.
    """
    run = key.run.rpartition("/")[2]
    message_id = "msg_" + hashlib.sha256("\n".join(key).encode()).hexdigest()[:32]
    address = f"{settings.public_url}/runs/{quote(run)}" if settings.public_url else None
    if settings.webhook_form == "slack":
        document: dict[str, Any] = {"text": _slack_text(run, workspace, address, findings)}
    else:
        document = {
            "type": "findings",
            "timestamp": datetime.fromtimestamp(now_ns / 1e9, UTC).isoformat(),
            "data": {
                "workspace": workspace,
                "run": run,
                "attempt": key.attempt,
                "address": address,
                "findings": [{part: finding[part] for part in _PARTS} for finding in findings[:_MAX_FINDINGS]],
                "left_out": max(0, len(findings) - _MAX_FINDINGS),
            },
        }
    return Message(key, message_id, msgspec.json.encode(document))


def headers_of(message: Message, secret: str | None, now_s: int) -> dict[str, str]:
    """Return the headers of an attempt to send a message, with a signature if there is a secret.

    Args:
        message: The message.
        secret: `whsec_` and the key in Base64.
        now_s: Unix time in seconds: a receiver refuses a message that was signed long ago.
    """
    headers = {
        "Content-Type": "application/json",
        "webhook-id": message.message_id,
        "webhook-timestamp": str(now_s),
    }
    if secret is not None:
        signed = f"{message.message_id}.{now_s}.".encode() + message.body
        digest = hmac.new(webhook_key(secret), signed, hashlib.sha256).digest()
        headers["webhook-signature"] = f"v1,{b64encode(digest).decode()}"
    return headers


def _slack_text(run: str, workspace: str, address: str | None, findings: Sequence[Mapping[str, Any]]) -> str:
    """Return a text in Slack's markup: https://api.slack.com/reference/surfaces/formatting."""
    name = f"<{address}|{_escaped(run)}>" if address else _escaped(run)
    lines = [f"Run {name} (workspace {_escaped(workspace)})"]
    for finding in findings[:_MAX_FINDINGS]:
        lines.append(f"*{_escaped(finding_heading(finding))}*")
        lines += [f"• {_escaped(label)}: {_escaped(text)}" for label, text in finding_lines(finding)]
    if (left_out := len(findings) - _MAX_FINDINGS) > 0:
        lines.append(f"and {left_out} more")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Return a text that Slack shows as it is: without links and without calls of a channel."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
