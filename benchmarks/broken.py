"""Broken collectors, each on a real socket.

    python -m benchmarks.broken FAULT     listens, and prints the address

The system chooses the port.
"""

from __future__ import annotations

import argparse
import itertools
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from email.utils import formatdate

_BACKLOG = 4
_ENDLESS = b"a" * 65536

Answer = Callable[[socket.socket], None]


def _send(text: bytes, *, then: bytes = b"", pause_s: float = 0.0) -> Answer:
    """Return an answer that sends `text` to every request, then repeats `then` (if given) with pauses in between."""

    def answer(connection: socket.socket) -> None:
        _request(connection)
        connection.sendall(text)
        for _ in itertools.count() if then else ():
            connection.sendall(then)
            time.sleep(pause_s)

    return answer


def _status(line: str, *headers: str, body: str = "no") -> Answer:
    lines = [f"HTTP/1.1 {line}", *headers, f"Content-Length: {len(body)}", "Connection: close", "", body]
    return _send("\r\n".join(lines).encode())


def _silent(connection: socket.socket) -> None:
    while connection.recv(65536):
        pass


def _away(connection: socket.socket) -> None:
    date = formatdate(time.time() + 3600, usegmt=True)
    _status("503 Service Unavailable", f"Retry-After: {date}")(connection)


FAULTS: dict[str, tuple[str, Answer | None]] = {
    "refuses": ("refuses connections", None),
    "drops": ("does not answer a SYN", None),
    "waits": ("never accepts", None),
    "silent": ("accepts and never answers", _silent),
    "drips": ("answers one byte a second", _send(b"HTTP/1.1 200 OK\r\nX-Slow: ", then=b"a", pause_s=1.0)),
    "fails": ("answers 500", _status("500 Internal Server Error")),
    "foreign": ("speaks no HTTP", _send(b"SSH-2.0-OpenSSH_9.9\r\n")),
    "page": ("answers 200 with a page", _status("200 OK", "Content-Type: text/html", body="<html>welcome</html>")),
    "endless": ("answers without an end", _send(b"HTTP/1.1 200 OK\r\n\r\n", then=_ENDLESS, pause_s=0.01)),
    "headers": ("answers headers without an end", _send(b"HTTP/1.1 200 OK\r\nX: ", then=_ENDLESS, pause_s=0.01)),
    "redirects": ("redirects", _status("301 Moved Permanently", "Location: http://127.0.0.1:9/")),
    "busy": ("answers 429, retry in an hour", _status("429 Too Many Requests", "Retry-After: 3600")),
    "away": ("answers 503, retry on a date", _away),
}
"""By fault: its title, and its treatment of a connection (None if it never accepts any)."""


@contextmanager
def broken(fault: str) -> Iterator[str]:
    """Run such a collector while the context lasts; yields its address."""
    answer = FAULTS[fault][1]
    with ExitStack() as stack:
        server = stack.enter_context(
            socket.create_server(("127.0.0.1", 0), backlog=0 if fault == "drops" else _BACKLOG)
        )
        address = server.getsockname()
        if fault == "refuses":
            server.close()
        elif fault == "drops":
            _fill(address, stack)
        elif answer is not None:
            threading.Thread(target=_accept, args=(server, answer), daemon=True).start()
        yield f"http://127.0.0.1:{address[1]}"


def _fill(address: tuple[str, int], stack: ExitStack) -> None:
    """Fill a backlog that is never accepted: the system does not answer further connections."""
    while True:
        client = stack.enter_context(socket.socket())
        client.settimeout(0.2)
        try:
            client.connect(address)
        except TimeoutError:
            return


def _accept(server: socket.socket, answer: Answer) -> None:
    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            answer(connection)

    with suppress(OSError):
        while True:
            threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()


def _request(connection: socket.socket) -> None:
    """Read a request with its body."""
    text = b""
    while b"\r\n\r\n" not in text:
        text += _more(connection)
    head, _, body = text.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    missing = int(lengths[0]) - len(body) if lengths else 0
    while missing > 0:
        missing -= len(_more(connection))


def _more(connection: socket.socket) -> bytes:
    piece = connection.recv(65536)
    if not piece:
        raise ConnectionError("the request ended early")
    return piece


def main() -> None:
    """Serve one fault until this process ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fault", choices=FAULTS)
    with broken(parser.parse_args().fault) as url:
        sys.stdout.write(f"listening on {url}\n")
        sys.stdout.flush()
        threading.Event().wait()


if __name__ == "__main__":
    main()
