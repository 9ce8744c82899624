"""Diagnoses in the background, in one thread, which waits while a scrape is computed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from ddpobs_server.store import UnavailableError
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
        self._executor = ThreadPoolExecutor(1, "ddpobs-reports")
        self._running: dict[_Key, Future[None]] = {}
        self._lock = threading.Lock()
        self._scrapes, self._may_begin = 0, threading.Event()
        self._may_begin.set()

    def begin(self, changed: list[_Key]) -> dict[_Key, Future[None]]:
        """Begin the diagnoses that are not under way; return all that are."""
        with self._lock:
            self._running = {key: future for key, future in self._running.items() if not future.done()}
            for key in changed:
                if key not in self._running:
                    self._running[key] = self._executor.submit(self._diagnose, key)
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
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _diagnose(self, key: _Key) -> None:
        self._may_begin.wait(_SCRAPE_S)
        try:
            with self._faults.contained("diagnosis", key[0]):
                self._function(*key)
        except UnavailableError as error:
            _log.warning("run %s was not diagnosed: %s", key[0], error)
