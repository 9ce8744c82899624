"""Tokens of access."""

from __future__ import annotations

from ddpobs_server.store import Store
from ddpobs_server.web.authenticator import new_token


def create_token(url: str, name: str, workspace: str, *scopes: str) -> str:
    """As the command `token create`, without its process."""
    store = Store(url)
    store.migrate()
    token, record = new_token(name, workspace, list(scopes))
    store.add_token(record)
    store.close()
    return token
