"""Bounds the size and arrival time of headers and trailers, which a client may send without a token.

Also bounds how long a response may stay unread: until then it occupies memory.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ddpobs_server.web import problems
from ddpobs_server.web.chunked_responses import CHUNK_BYTES
from ddpobs_server.web.problems import MEDIA_TYPE, Problem

HEAD_BYTES, HEAD_S = 65_536, 30.0
"""Maximum size of headers or trailers, and the longest time in seconds until the headers are complete."""
REST_S = 10.0
"""Seconds the rest of a request is read after its response: many clients read the response only when all is sent."""
UNREAD_S = 30.0
"""Longest time in seconds in which a client reads nothing of a response, or too little for the next chunk."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's connection, closed if headers or trailers are too large or too slow.

    If responses stay unread, the connection is aborted instead: closing it would wait for the client to read.
    """

    _bytes = 0
    """Size so far of the headers or trailers; 0 within a body."""
    _in_head, _received_body = True, False
    _timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    """Runs while the transport's buffer is above its high-water mark."""

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the first headers."""
        super().connection_made(transport)
        self._await_head()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        self._cancel_timer()
        self._cancel_unread_timer()
        super().connection_lost(exc)

    @override
    def pause_writing(self) -> None:
        """Wait for the client to read, for at most `UNREAD_S`."""
        super().pause_writing()
        self._cancel_unread_timer()
        self._unread_timer = self.loop.call_later(self._unread_s(), self._abort_unread)

    @override
    def resume_writing(self) -> None:
        """Cancel the timer: the client has read enough."""
        self._cancel_unread_timer()
        super().resume_writing()

    @override
    def on_message_begin(self) -> None:
        """Start the timer of the headers."""
        super().on_message_begin()
        self._await_head()

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header and drop a trailer, which would change the headers of a request in progress."""
        if self._in_head:
            super().on_header(name, value)

    @override
    def on_headers_complete(self) -> None:
        """Cancel the timer: the headers are complete."""
        self._cancel_timer()
        self._received_body = True
        super().on_headers_complete()
        self._in_head = False

    @override
    def on_body(self, body: bytes) -> None:
        """Take a part of the body; `ingest.body` bounds its size."""
        self._received_body = True
        super().on_body(body)

    @override
    def on_message_complete(self) -> None:
        """Expect the next request if the response is already complete."""
        super().on_message_complete()
        self._in_head = True
        if self.cycle.response_complete:
            self._await_head(self.timeout_keep_alive)

    @override
    def on_response_complete(self) -> None:
        """Expect the next request if this one has ended; otherwise read its rest for at most `REST_S`."""
        super().on_response_complete()
        if self._timer is not None or not self.cycle.response_complete:
            return  # Pipelined requests are in progress.
        if self._in_head:
            self._await_head(self.timeout_keep_alive)
        else:
            self._timer = self.loop.call_later(REST_S, self._close)

    @override
    def data_received(self, data: bytes) -> None:
        """Parse data; count the bytes outside of a body."""
        self._received_body = False
        super().data_received(data)
        self._bytes = 0 if self._received_body else self._bytes + len(data)
        if self._bytes > HEAD_BYTES:
            self._refuse(Problem(431, "Headers too large", f"the headers may have at most {HEAD_BYTES} bytes"))

    def _await_head(self, within_s: float | None = None) -> None:
        """Expect the next headers. Between two requests `within_s` is the time a connection may stay idle."""
        self._cancel_timer()
        self._bytes, self._in_head = 0, True
        self._timer = self.loop.call_later(HEAD_S if within_s is None else within_s, self._refuse_slow_headers)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cancel_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    @override
    def send_400_response(self, msg: str) -> None:
        """Refuse a request that the parser rejects, with a problem instead of uvicorn's text."""
        self._refuse(Problem(400, "Malformed request", "expected an HTTP/1.1 request, got malformed data"))

    def _refuse_slow_headers(self) -> None:
        if self._bytes:
            self._refuse(Problem(408, "Request too slow", f"the headers did not arrive within {HEAD_S:g} s"))
        else:  # An idle connection, as browsers keep open: no request was refused.
            self._close()

    def _unread_s(self) -> float:
        """Seconds for the next chunk: `UNREAD_S`, or fewer at the least pace of the settings."""
        settings = getattr(self.config.app.state, "settings", None)  # type: ignore[union-attr]
        return min(UNREAD_S, CHUNK_BYTES / (settings.min_pace_kb_s * 1e3)) if settings else UNREAD_S

    def _abort_unread(self) -> None:
        detail = f"the client read too little of the response within {self._unread_s():g} s"
        self._record(Problem(408, "Response not read", detail))
        self.transport.abort()

    def _refuse(self, problem: Problem) -> None:
        if not self.transport.is_closing():
            self._record(problem)
            if self._can_respond():
                self._respond(problem)
        self._close()

    def _record(self, problem: Problem) -> None:
        app: Any = self.config.app
        problems.record_problem(app, problem, client=self.client[0] if self.client else "unknown")

    def _can_respond(self) -> bool:
        """Whether the current request has no response yet and no other response is in progress."""
        if self._in_head:
            return self.cycle is None or self.cycle.response_complete
        return not (self.cycle.response_started or self.pipeline)

    def _respond(self, problem: Problem) -> None:
        body = msgspec.json.encode(problem.document)
        fields: dict[str, Any] = {"Content-Type": MEDIA_TYPE, "Content-Length": len(body), "Connection": "close"}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.transport.write(f"HTTP/1.1 {problem.status} {problem.document['title']}\r\n{head}\r\n".encode() + body)

    def _close(self) -> None:
        """Close after the client has read all; abort after `UNREAD_S`, as it may never do so."""
        self._cancel_timer()
        self.transport.close()
        self._timer = self.loop.call_later(UNREAD_S, self._abort_unread)
