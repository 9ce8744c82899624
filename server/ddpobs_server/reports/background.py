"""Diagnoses in the background, in one thread, in which workspaces take turns. It waits while a scrape is computed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager

from ddpobs_server.store import UnavailableError
from ddpobs_server.web.fair_queue import FairQueue
from ddpobs_server.web.run_faults import RunFaults

_log = logging.getLogger(__name__)
_SCRAPE_S = 2.0
"""Longest time for which a diagnosis waits for scrapes."""
_Key = tuple[str, str]
"""Run and attempt."""


class BackgroundDiagnoses:
    """Diagnoses each attempt once at a time.

    Args:
        diagnose: Diagnoses an attempt of a run.
        faults: Contains the errors of single runs.
    """

    def __init__(self, diagnose: Callable[[str, str], object], faults: RunFaults) -> None:
        self._function, self._faults = diagnose, faults
        self._queue: FairQueue[tuple[_Key, Future[None]]] = FairQueue()
        self._running: dict[_Key, Future[None]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._scrapes, self._may_begin = 0, threading.Event()
        self._may_begin.set()

    def begin(self, changed: Mapping[_Key, bool]) -> dict[_Key, Future[None]]:
        """Begin the diagnoses that are not under way; return all that are.

        Args:
            changed: Whether each is urgent, which puts it before the others of its workspace.
        """
        with self._lock:
            if self._thread is None and changed and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="ddpobs-reports", daemon=True)
                self._thread.start()
            self._running = {key: future for key, future in self._running.items() if not future.done()}
            for key, is_urgent in changed.items():
                if key not in self._running:
                    self._running[key] = Future()
                    self._queue.put(key[0].rpartition("/")[0], (key, self._running[key]), urgent=is_urgent)
            return dict(self._running)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Begin no diagnosis during the block: it would compete with a scrape for the interpreter."""
        with self._lock:
            self._scrapes += 1
            self._may_begin.clear()
        try:
            yield
        finally:
            with self._lock:
                self._scrapes -= 1
                if not self._scrapes:
                    self._may_begin.set()

    def close(self) -> None:
        """Begin no further diagnosis."""
        self._is_closed = True
        self._queue.close()

    def _run(self) -> None:
        while (taken := self._queue.get()) is not None:
            key, future = taken[1]
            if not self._is_closed:
                self._may_begin.wait(_SCRAPE_S)
                self._diagnose(key)
            future.set_result(None)

    def _diagnose(self, key: _Key) -> None:
        try:
            with self._faults.contained("diagnosis", key[0]):
                self._function(*key)
        except UnavailableError as error:
            _log.warning("run %s was not diagnosed: %s", key[0], error)
