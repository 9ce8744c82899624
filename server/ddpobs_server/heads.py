"""What comes before a request's body is bounded too, in size and in time: nobody needs a token to send it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ddpobs_server.problems import MEDIA_TYPE, Problem

MOST_BYTES, MOST_S = 65_536, 30.0


class BoundedHead(HttpToolsProtocol):
    """uvicorn's connection; one whose request line and headers are too long or too slow to come is closed."""

    _head_bytes: int | None = 0
    """Of the head that has begun and not ended; None between heads."""
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first head."""
        super().connection_made(transport)
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._end()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._end()
        self._begin()

    def on_headers_complete(self) -> None:
        """It has ended."""
        self._end()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Take bytes; those of a head that has not ended are counted."""
        super().data_received(data)
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_BYTES:
                self._refuse(Problem(431, "Headers too large", f"at most {MOST_BYTES} bytes come before the body"))

    def _begin(self) -> None:
        self._head_bytes = 0
        slow = Problem(408, "Request too slow", f"the headers did not come within {MOST_S:g} s")
        self._timer = self.loop.call_later(MOST_S, self._refuse, slow)

    def _end(self) -> None:
        self._head_bytes = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, problem: Problem) -> None:
        self._end()
        if self.transport.is_closing():
            return
        body = msgspec.json.encode(problem.document)
        fields: dict[str, Any] = {"Content-Type": MEDIA_TYPE, "Content-Length": len(body), "Connection": "close"}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.transport.write(f"HTTP/1.1 {problem.status} {problem.document['title']}\r\n{head}\r\n".encode() + body)
        self.transport.close()
