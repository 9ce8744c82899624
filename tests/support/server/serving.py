"""The application served by a thread of this process, so that a test may change its time limits."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from ddpobs_server.web import bounded_protocol, problems
from fastapi import FastAPI
from prometheus_client import CollectorRegistry


def empty_app() -> FastAPI:
    app = FastAPI(openapi_url=None)
    problems.install(app, CollectorRegistry())
    return app


@contextmanager
def served(app: FastAPI | None = None) -> Iterator[tuple[str, int]]:
    """The address of a server. Without an application it responds 404 to every request, before the body arrives."""
    app = app or empty_app()
    listening = socket.create_server(("127.0.0.1", 0))
    # The system's buffer is outside of the limits under test: keep it small.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server = uvicorn.Server(uvicorn.Config(app, http=bounded_protocol.BoundedHttpProtocol, ws="none", log_config=None))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield listening.getsockname()
    finally:
        server.should_exit = True
        thread.join(60)


def read_until_closed(client: socket.socket) -> str:
    """All data until the collector closes the connection."""
    return b"".join(iter(lambda: client.recv(65536), b"")).decode()
