"""The security policy of a report; without Bokeh, which takes half a second to import."""

from __future__ import annotations


def report_policy(nonce: str) -> str:
    """Return a policy that allows only the scripts and styles of the report itself."""
    return f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; base-uri 'none'"
