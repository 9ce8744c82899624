"""What comes beside a request's body is bounded too, in size and in time: nobody needs a token to send it.

So is how long an answer waits for its reader: until it is read it takes memory.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ddpobs_server.web import problems
from ddpobs_server.web.problems import MEDIA_TYPE, Problem

MOST_BYTES, MOST_S = 65_536, 30.0
REST_S = 10.0
"""How long what is left of a request is read after its answer: many clients read that only once they have sent all."""
UNREAD_S = 30.0
"""How long a client may read nothing of an answer, or not enough for its next piece."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's connection; one is closed whose requests are, beside their bodies, too long or too slow to come.

    One whose answers are not read is aborted: to close it would wait for its reader.
    """

    _bytes = 0
    """Of the head or the trailers that have begun; none while a body comes."""
    _in_head, _took_body = True, False
    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    """Runs while more waits to be read than the transport likes to hold."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first head."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._end()
        self._end_unread()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Wait for the reader, but not for ever."""
        super().pause_writing()
        self._end_unread()
        self._unread = self.loop.call_later(UNREAD_S, self._give_up)

    def resume_writing(self) -> None:
        """The client has read enough."""
        self._end_unread()
        super().resume_writing()

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; a trailer is none, and would change a request that is being answered."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head has ended."""
        self._end()
        self._took_body = True
        super().on_headers_complete()
        self._in_head = False

    def on_body(self, body: bytes) -> None:
        """A part of the body, which `limits` bounds."""
        self._took_body = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request has ended; the next may come once it is answered."""
        super().on_message_complete()
        self._in_head = True
        if self.cycle.response_complete:
            self._await_head()

    def on_response_complete(self) -> None:
        """The next request may come once this one has ended."""
        super().on_response_complete()
        if self._timer is not None or not self.cycle.response_complete:
            return  # Requests that came before their time are under way.
        if self._in_head:
            self._await_head()
        else:
            self._timer = self.loop.call_later(REST_S, self._close)

    def data_received(self, data: bytes) -> None:
        """Take bytes; those beside a body are counted."""
        self._took_body = False
        super().data_received(data)
        self._bytes = 0 if self._took_body else self._bytes + len(data)
        if self._bytes > MOST_BYTES:
            self._refuse(Problem(431, "Headers too large", f"at most {MOST_BYTES} bytes come before the body"))

    def _await_head(self) -> None:
        self._end()
        self._bytes, self._in_head = 0, True
        self._timer = self.loop.call_later(MOST_S, self._too_slow)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser cannot read."""
        self._refuse(Problem(400, "Malformed request", "expected a request of HTTP/1.1, got what is none"))

    def _too_slow(self) -> None:
        if self._bytes:
            self._refuse(Problem(408, "Request too slow", f"the headers did not come within {MOST_S:g} s"))
        else:  # A connection that rests, as browsers keep some, is no request that was refused.
            self._close()

    def _give_up(self) -> None:
        self._note(Problem(408, "Answer not read", f"of an answer too little was read within {UNREAD_S:g} s"))
        self.transport.abort()

    def _refuse(self, problem: Problem) -> None:
        if not self.transport.is_closing():
            self._note(problem)
            if self._unanswered():
                self._answer(problem)
        self._close()

    def _note(self, problem: Problem) -> None:
        app: Any = self.config.app
        problems.note(app, problem, client=self.client[0] if self.client else "unknown")

    def _unanswered(self) -> bool:
        """Whether the request at hand has no answer yet, and no other's is under way."""
        if self._in_head:
            return self.cycle is None or self.cycle.response_complete
        return not (self.cycle.response_started or self.pipeline)

    def _answer(self, problem: Problem) -> None:
        body = msgspec.json.encode(problem.document)
        fields: dict[str, Any] = {"Content-Type": MEDIA_TYPE, "Content-Length": len(body), "Connection": "close"}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.transport.write(f"HTTP/1.1 {problem.status} {problem.document['title']}\r\n{head}\r\n".encode() + body)

    def _close(self) -> None:
        """Close once all is read, which may be never."""
        self._end()
        self.transport.close()
        self._timer = self.loop.call_later(UNREAD_S, self._give_up)
