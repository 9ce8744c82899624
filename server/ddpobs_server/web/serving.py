"""uvicorn, with an end that is orderly, bounded, and at once on request."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI

_log = logging.getLogger(__name__)
_END_S = 30
"""How long all of the end may take, whatever a client or the database does."""
_IDLE_S = 30
"""How long a connection may rest between two requests: longer than a rank does between two batches."""
_LEFT_S = 1.0
"""How long threads may hold the process once all is closed."""
_KEPT_BYTES = 2**25 - 2**16
"""Below glibc's most, 32 MiB."""


def run(app: FastAPI, **settings: Any) -> None:
    """`uvicorn.run` until SIGTERM or Ctrl-C; what was accepted is then written, and the process may end with 0.

    A second signal ends the process at once. Nothing that was acknowledged is lost by it: that is committed.

    Args:
        app: The application.
        **settings: uvicorn's.

    Raises:
        SystemExit: With 1, where the application did not start.
    """
    # A connection is an open file, and each rank has one: the usual soft limit is 1,024, for programs that use select.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # Some systems call it endless and do not take that.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    server = _Server(uvicorn.Config(app, timeout_keep_alive=_IDLE_S, **settings))
    # uvicorn raises the signal again once it has ended, for whoever had a handler before.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(KeyboardInterrupt, SystemExit):  # uvicorn's own: with 3, where it did not start.
        server.run()
    if not server.started:
        sys.exit(1)


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start; what is there by then stays, and need not be looked through for garbage again and again."""
        await super().startup(sockets)
        gc.collect()
        gc.freeze()
        _keep_memory()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End; threads that wait for a database which hangs would hold the process, and are left behind."""
        await super().shutdown(sockets)
        leave = threading.Timer(_LEFT_S, os._exit, [0])
        leave.daemon = True
        leave.start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the orderly end; from here on the system itself ends the process, at the next signal or in time."""
        signal.signal(sig, signal.SIG_DFL)
        signal.alarm(_END_S)
        super().handle_exit(sig, frame)


def close(within_s: float, *parts: Callable[[], None]) -> None:
    """Close parts of the application at the same time; those that take too long are left at it, on daemon threads."""
    deadline = time.monotonic() + within_s
    closing = [threading.Thread(target=part, name=part.__qualname__, daemon=True) for part in parts]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            _log.warning("%s did not end within %g s", thread.name, within_s)


def _keep_memory() -> None:
    """Have glibc reuse the memory of a batch's arrays for the next batch, instead of asking the system for each.

    A block that is freed raises the size from which it asks the system, and twice that is what it may keep: mallopt(3),
    M_MMAP_THRESHOLD. New pages would cost several times the arithmetic on them. Elsewhere this does nothing.
    """
    np.empty(_KEPT_BYTES, np.uint8)
