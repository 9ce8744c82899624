"""Tokens of workspaces, and clients that stop in the middle of a request."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from ddpobs_server.store import Store
from ddpobs_server.web.authenticator import new_token


def bearer(database_url: str, workspace: str, *scopes: str) -> dict[str, str]:
    """The header with a new token of a workspace."""
    store = Store(database_url)
    store.migrate()
    secret, record = new_token(workspace, workspace, list(scopes) or ["ingest", "read"])
    store.add_token(record)
    store.close()
    return {"Authorization": f"Bearer {secret}"}


@contextmanager
def stuck_clients(url: str, count: int, head: str, headers: dict[str, str], body: bytes = b"") -> Iterator[None]:
    """Connections that send a request's head and the begin of its body, and read nothing."""
    address = urlsplit(url)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    clients = []
    try:
        for _ in range(count):
            client = socket.socket()
            clients.append(client)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(30)
            client.connect((address.hostname, address.port))
            client.sendall(f"{head} HTTP/1.1\r\nHost: here\r\n{lines}\r\n".encode() + body)
        yield
    finally:
        for client in clients:
            client.close()
