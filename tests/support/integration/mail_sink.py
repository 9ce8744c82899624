"""An SMTP server that keeps the mails it receives."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes, policy
from email.message import EmailMessage


class _Dialogue(socketserver.StreamRequestHandler):
    """RFC 5321, without extensions: each command is accepted, and the text after DATA is kept."""

    server: _Server

    def handle(self) -> None:
        self.wfile.write(b"220 sink\r\n")
        while line := self.rfile.readline():
            if line.upper().startswith(b"QUIT"):
                self.wfile.write(b"221 bye\r\n")
                return
            if not line.upper().startswith(b"DATA"):
                self.wfile.write(b"250 ok\r\n")
                continue
            self.wfile.write(b"354 go on\r\n")
            text = b""
            while (line := self.rfile.readline()) != b".\r\n":
                text += line.removeprefix(b".") if line.startswith(b"..") else line
            self.server.mails.append(message_from_bytes(text, policy=policy.default))
            self.wfile.write(b"250 kept\r\n")


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Dialogue)
        self.mails: list[EmailMessage] = []


@contextmanager
def mail_sink() -> Iterator[tuple[str, list[EmailMessage]]]:
    """Serve on a free port; yields the address and the list of mails, which grows."""
    with _Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}", server.mails
        server.shutdown()
