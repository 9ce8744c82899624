"""Ports that a program under test can be told, and find free again when it is started anew."""

from __future__ import annotations

import socket
from contextlib import suppress
from random import SystemRandom

_OURS = range(20_000, 32_768)
"""Below the ports that systems give out by themselves, to whatever runs at the same time."""


def free_port() -> int:
    """A port of 127.0.0.1 where nobody listens.

    Raises:
        OSError: None was found.
    """
    for port in SystemRandom().sample(_OURS, 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError(f"no free port among 100 of {_OURS}")
