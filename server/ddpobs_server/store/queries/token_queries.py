"""Tokens: read, add and revoke."""

from __future__ import annotations

from sqlalchemy import Connection, select

from ddpobs_server.store import schema
from ddpobs_server.store.queries.audit_queries import add_entry
from ddpobs_server.store.rows import AuditEntry, Token


def tokens(connection: Connection) -> list[Token]:
    """All tokens, including revoked tokens, oldest first."""
    rows = connection.execute(select(schema.tokens).order_by(schema.tokens.c.created_ns)).all()
    return [
        Token(**{**row._mapping, "digest": bytes(row.digest), "scopes": tuple(row.scopes.split(","))}) for row in rows
    ]


def add_token(connection: Connection, token: Token, entry: AuditEntry | None = None) -> None:
    """Store a token, with an entry of the audit log."""
    connection.execute(schema.tokens.insert(), {**vars(token), "scopes": ",".join(token.scopes)})
    add_entry(connection, entry)


def revoke_token(connection: Connection, token_id: str, from_ns: int, entry: AuditEntry | None = None) -> bool:
    """Let a token end at a time, unless it ends earlier; False if there is no such token with this id."""
    c = schema.tokens.c
    lasts = c.revoked_ns.is_(None) | (c.revoked_ns > from_ns)
    statement = schema.tokens.update().where(c.token_id == token_id, lasts)
    revoked = bool(connection.execute(statement.values(revoked_ns=from_ns)).rowcount)
    add_entry(connection, entry if revoked else None)
    return revoked
