"""uvicorn with an orderly shutdown of bounded duration; a second signal ends the process at once."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from typing_extensions import override

from ddpobs_server import signals
from ddpobs_server.web import memory

_log = logging.getLogger(__name__)
_END_S = 30
"""Longest duration of the whole shutdown in seconds, whatever a client or the database does."""
_EXIT_S = 1.0
"""Seconds that threads may delay the process's exit after everything is closed."""
_SWITCH_S = 0.001
"""Time for which a busy thread keeps the interpreter while others wait. A batch takes it some fifty times. Beside two
busy threads a commit took 0.6 of its time with Python's 5 ms."""


OnReload = Callable[[ssl.SSLContext | None], None]


def run(
    app: FastAPI,
    sockets: list[socket.socket],
    on_start: Callable[[str], None],
    on_reload: OnReload,
    **settings: Any,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then write all accepted batches and return.

    A second signal ends the process at once. Acknowledged batches survive that: they are committed.

    Args:
        app: The application.
        sockets: Bound sockets to listen on.
        on_start: Called with the server's URLs when it accepts connections.
        on_reload: Called after SIGHUP, on a thread, with the TLS context of new connections; None without TLS.
        **settings: Settings of `uvicorn.Config`.

    Raises:
        SystemExit: With 1, if the application did not start.
    """
    sys.setswitchinterval(_SWITCH_S)
    # Each rank's connection is an open file. The usual soft limit is 1,024, for programs that use select.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # Some systems report an unlimited hard limit and refuse it as a soft limit.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    server = _Server(uvicorn.Config(app, **settings), on_start, on_reload)
    with suppress(KeyboardInterrupt, SystemExit):  # uvicorn exits with 3 if it did not start.
        server.run(sockets)
    if not server.started:
        sys.exit(1)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_start: Callable[[str], None], on_reload: OnReload) -> None:
        super().__init__(config)
        self._on_start, self._on_reload = on_start, on_reload

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then exclude all objects created so far from garbage collection: they live until the end."""
        try:
            for bound in sockets or []:
                bound.listen(self.config.backlog)
        except OSError as error:  # Another process began to listen after the sockets were bound.
            address = self._url(bound.getsockname())
            _log.error("cannot listen on %s: %s; end that process, or choose another --port", address, error.strerror)
            sys.exit(1)
        await super().startup(sockets)
        gc.collect()
        gc.freeze()
        memory.retain_freed()
        self._on_start(" and ".join(self._url(server.sockets[0].getsockname()) for server in self.servers))

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down, then exit without threads that wait for a hanging database and would block the exit."""
        await super().shutdown(sockets)
        exit_timer = threading.Timer(_EXIT_S, os._exit, [0])
        exit_timer.daemon = True
        exit_timer.start()

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the shutdown. The next signal, or an alarm after `_END_S`, ends the process at once."""
        signals.end_within(_END_S)
        self.should_exit = True

    @override
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals until the process ends; uvicorn would raise them again after its shutdown."""
        for number in signals.ENDING:
            signal.signal(number, self.handle_exit)
        signal.signal(signal.SIGHUP, self._handle_reload)
        yield

    def _handle_reload(self, _number: int, _frame: FrameType | None) -> None:
        """Reload on a thread, because files and the database may be slow. A signal before the start is ignored."""
        if self.started:
            threading.Thread(target=self._on_reload, args=(self.config.ssl,), name="ddpobs-reload", daemon=True).start()

    def _url(self, address: tuple[Any, ...]) -> str:
        host, port = address[:2]
        scheme = "https" if self.config.is_ssl else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def close(within_s: float, *callbacks: Callable[[], None]) -> None:
    """Call all callbacks at the same time, on daemon threads.

    Args:
        within_s: Seconds to wait; callbacks that take longer are logged and go on in their threads.
        *callbacks: `close` methods.
    """
    deadline = time.monotonic() + within_s
    threads = [threading.Thread(target=callback, name=callback.__qualname__, daemon=True) for callback in callbacks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            _log.warning("shutdown: %s did not end within %g s; the process ends without it", thread.name, within_s)
