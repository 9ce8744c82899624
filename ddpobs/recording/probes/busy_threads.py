"""Python threads beside the training thread that take a processor: they share the interpreter lock with it."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path

_MIN_PERMILLE = 50
_MAX_THREADS, _MAX_NAME = 4, 256
_OURS = "ddpobs"
"""First letters of the names of telemetry's threads."""


class BusyThreads:
    """Processor time of the process's Python threads since the first look, by name.

    Args:
        proc: The proc file system.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._tasks = proc / "self" / "task"
        self._began_ns = time.monotonic_ns()
        self._first_ns: dict[int, int] = {}
        self._used_ns: dict[str, dict[int, int]] = {}

    def look(self, training_thread: int) -> dict[str, int]:
        """Return the threads that took most, each with its part of a processor's time in thousandths."""
        for thread in threading.enumerate():
            number = thread.native_id
            if number is None or thread.ident == training_thread or thread.name.startswith(_OURS):
                continue
            with suppress(OSError, ValueError, IndexError):
                running_ns = int((self._tasks / str(number) / "schedstat").read_text().split()[0])
                used_ns = running_ns - self._first_ns.setdefault(number, running_ns)
                self._used_ns.setdefault(thread.name[:_MAX_NAME], {})[number] = used_ns
        took_ns = max(1, time.monotonic_ns() - self._began_ns)
        shares = {name: 1000 * sum(used.values()) // took_ns for name, used in self._used_ns.items()}
        busiest = sorted(shares, key=shares.__getitem__, reverse=True)[:_MAX_THREADS]
        return {name: shares[name] for name in busiest if shares[name] >= _MIN_PERMILLE}
