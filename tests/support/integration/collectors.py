"""Small real HTTP servers that misbehave as collectors and proxies do."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.message import Message
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Reply = tuple[int, dict[str, str], bytes]


@dataclass
class Seen:
    """Requests that the server received: path, body and time of arrival."""

    puts: list[tuple[str, bytes, float]] = field(default_factory=list)
    headers: list[Message] = field(default_factory=list)
    """Of each GET."""
    url: str = ""


def acknowledge(path: str) -> Reply:
    parts = path.split("/")
    return 201, {}, json.dumps({"source": parts[6], "seq": int(parts[8]), "repeated": False}).encode()


def status(code: int, **headers: str) -> Callable[[str], Reply]:
    return lambda path: (code, {k.replace("_", "-"): v for k, v in headers.items()}, b'{"detail": "no"}')


def rubbish(path: str) -> Reply:
    return 200, {}, b"<html>welcome</html>"


@contextmanager
def collector(*replies: Callable[[str], Reply], port: int = 0, tls: ssl.SSLContext | None = None) -> Iterator[Seen]:
    """Answers with each reply in turn, and with the last one from then on."""
    seen = Seen()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            seen.puts.append((self.path, body, time.monotonic()))
            self.answer(replies[min(len(seen.puts), len(replies)) - 1](self.path))

        def do_GET(self) -> None:
            seen.headers.append(self.headers)
            self.answer(replies[0](self.path))

        def answer(self, reply: Reply) -> None:
            code, headers, text = reply
            self.send_response(code)
            for name, value in {**headers, "Content-Length": str(len(text))}.items():
                self.send_header(name, value)
            with suppress(ConnectionError):  # The client may have gone.
                self.end_headers()
                self.wfile.write(text)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    port = server.server_address[1]
    seen.url = f"http://127.0.0.1:{port}" if tls is None else f"https://localhost:{port}"
    try:
        yield seen
    finally:
        server.shutdown()
        server.server_close()


@cache
def absent() -> str:
    """Return an address that refuses connections: its port is held, without a listener, until the process ends."""
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    held.detach()
    return f"http://127.0.0.1:{port}"
