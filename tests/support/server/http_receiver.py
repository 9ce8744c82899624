"""A receiver of HTTP requests that a test answers, such as a webhook's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Received:
    """A request."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """Its address, and the requests so far. `replies` are used one after the other; then each reply is 200."""

    url: str = ""
    requests: list[Received] = field(default_factory=list)
    replies: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    may_reply: threading.Event = field(default_factory=threading.Event)
    """Requests wait for it."""


@contextmanager
def http_receiver() -> Iterator[Receiver]:
    """A receiver on a free port of this machine."""
    receiver = Receiver()
    receiver.may_reply.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            receiver.requests.append(Received(self.path, headers, body))
            receiver.may_reply.wait(60)
            status, sent = receiver.replies.pop(0) if receiver.replies else (200, {})
            self.send_response(status)
            for name, value in ({"Content-Length": "0"} | sent).items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield receiver
    finally:
        receiver.may_reply.set()
        server.shutdown()
        thread.join()
        server.server_close()
