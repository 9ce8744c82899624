"""Ports for programs to start, which remain free when the program restarts."""

from __future__ import annotations

import socket
from contextlib import suppress
from random import SystemRandom

_RANGE = range(20_000, 32_768)
"""Range below the ports that systems assign to other programs."""


def free_port() -> int:
    """Return a port of 127.0.0.1 without a listener.

    Raises:
        OSError: No free port was found.
    """
    for port in SystemRandom().sample(_RANGE, 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError(f"no free port among 100 of {_RANGE}")
