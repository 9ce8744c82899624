"""A minimal collector in one Python process: a body over HTTP, into SQLite, acknowledged after commit.

    DDPOBS_SERVER_DATABASE_URL=sqlite:///bare.db python benchmarks/bare_collector.py

uvicorn with a raw ASGI application, and one thread that commits up to 64 bodies at a time, durably. It decodes, checks,
sums and looks up nothing: its throughput is the ceiling of this machine.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sqlite3
import threading
from typing import Any

import uvicorn

_GROUP = 64
Waiting = queue.SimpleQueue[tuple[str, bytes, "asyncio.Future[None]"]]


def write(database: str, waiting: Waiting, loop: asyncio.AbstractEventLoop) -> None:
    """Commit the waiting bodies, group by group, without end."""
    connection = sqlite3.connect(database, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE batches (path TEXT PRIMARY KEY, body BLOB)")
    while True:
        group = [waiting.get()]
        while len(group) < _GROUP and not waiting.empty():
            group.append(waiting.get())
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO batches VALUES (?, ?)", [(path, body) for path, body, _ in group])
        connection.execute("COMMIT")
        loop.call_soon_threadsafe(_acknowledge, [done for *_, done in group])


def _acknowledge(group: list[asyncio.Future[None]]) -> None:
    for done in group:
        if not done.done():
            done.set_result(None)


class Application:
    """The ASGI application; keeps each body under its path."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._waiting: Waiting = queue.SimpleQueue()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Receive a body, and answer 201 after its commit."""
        loop = asyncio.get_running_loop()
        if scope["type"] == "lifespan":
            await receive()
            threading.Thread(target=write, args=(self._path, self._waiting, loop), daemon=True).start()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        pieces, more = [], True
        while more:
            event = await receive()
            pieces.append(event["body"])
            more = event["more_body"]
        done: asyncio.Future[None] = loop.create_future()
        self._waiting.put((scope["path"], b"".join(pieces), done))
        await done
        await send({"type": "http.response.start", "status": 201, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


if __name__ == "__main__":
    url = os.environ["DDPOBS_SERVER_DATABASE_URL"]
    uvicorn.run(Application(url.removeprefix("sqlite:///")), port=0, access_log=False)
