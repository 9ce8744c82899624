"""The security policy of a report, and the times in it; without Bokeh, which takes half a second to import."""

from __future__ import annotations

from datetime import UTC, datetime


def report_policy(nonce: str) -> str:
    """Return a policy that allows only the scripts and styles of the report itself."""
    return f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; base-uri 'none'"


def utc(ns: int) -> str:
    """Format a time of day with its zone."""
    try:
        return datetime.fromtimestamp(ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):  # A client's clock may be absurd.
        return "unknown time"
