"""What the collector looks at without being asked: the database, the disk and its own event loop, as metrics."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
import time

from prometheus_client import CollectorRegistry, Gauge, Histogram, ProcessCollector

import ddpobs
from ddpobs_server.store import Store

_log = logging.getLogger(__name__)
_EVERY_S = 5.0
_HANGING_S = 15.0
"""A database that takes longer to answer is as good as down."""
_END_S = 2.0
_TICK_S = 0.25
_LAGS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Watch:
    """Looks at once, and then every five seconds, on a thread of its own.

    Args:
        store: What is looked at.
        registry: Takes the metrics, those of the process included.
    """

    def __init__(self, store: Store, registry: CollectorRegistry) -> None:
        self._store = store
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpobs-watch", daemon=True)
        self._well, self._looked_at = True, time.monotonic()
        ProcessCollector(registry=registry)
        info = Gauge("ddpobs_server_info", "1; the version is a label.", ["version"], registry=registry)
        info.labels(ddpobs.__version__).set(1)
        up = Gauge("ddpobs_server_database_up", "1 while the database answers.", registry=registry)
        up.set_function(lambda: self.database_answers)
        self._answer_s = Gauge(
            "ddpobs_server_database_answer_seconds", "How long the database took to answer last.", registry=registry
        )
        self._skew_s = Gauge(
            "ddpobs_server_clock_skew_seconds", "The database's clock less this machine's.", registry=registry
        )
        self._size = Gauge("ddpobs_server_store_bytes", "What the database takes on disk.", registry=registry)
        self._disk = Gauge(
            "ddpobs_server_disk_bytes", "The file system that holds a SQLite file.", ["what"], registry=registry
        )
        self._lag_s = Histogram(
            "ddpobs_server_event_loop_lag_seconds",
            "How much later than asked for the event loop woke.",
            buckets=_LAGS_S,
            registry=registry,
        )

    @property
    def database_answers(self) -> bool:
        """Whether the last look was answered, and not too long ago."""
        return self._well and time.monotonic() - self._looked_at < _EVERY_S + _HANGING_S

    def start(self) -> None:
        """Start the thread."""
        self._look()
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._ended.set()
        self._thread.join(_END_S)

    async def measure_lag(self) -> None:
        """Sleep and see how late it becomes, until cancelled; runs on the event loop that is measured."""
        while True:
            asked = time.monotonic() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self._lag_s.observe(max(0.0, time.monotonic() - asked))

    def _look(self) -> None:
        began = time.monotonic()
        try:
            skew_s = self._store.now_ns() / 1e9 - time.time()
            self._answer_s.set(time.monotonic() - began)
            self._skew_s.set(skew_s)
            self._size.set(self._store.size_bytes())
            self._well = True
        except Exception as error:
            self._well = False
            _log.error("the database does not answer: %s: %s", type(error).__name__, error)
        self._looked_at = time.monotonic()
        try:
            self._look_at_disk()
        except OSError as error:
            _log.error("the database's disk cannot be read: %s", error)

    def _look_at_disk(self) -> None:
        if (folder := self._store.folder) is not None and folder.is_dir():
            disk = shutil.disk_usage(folder)
            self._disk.labels("free").set(disk.free)
            self._disk.labels("all").set(disk.total)

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self._look()
