"""Metrics of the collector's own health: the database, the disk and the event loop."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge, Histogram, ProcessCollector

import ddpobs
from ddpobs_server.store import LostDatabaseError, OtherSchemaError, Store, UnavailableError

_log = logging.getLogger(__name__)
_PERIOD_S = 5.0
_HANGING_S = 15.0
"""A database that takes longer to answer counts as down."""
_FULL = "too little space is free on the database's disk"
_CLOSE_S = 2.0
_TICK_S = 0.25
_LAGS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class HealthMonitor:
    """Checks once at its start and then every five seconds, on its own thread.

    Args:
        store: The store to check.
        registry: Receives the metrics, including the process metrics.
        further_check: Called after each successful check, on the same thread.
        public_url: Address at which people open the page.
        grafana_url: Address at which they open Grafana.
    """

    def __init__(
        self,
        store: Store,
        registry: CollectorRegistry,
        further_check: Callable[[], None] = lambda: None,
        public_url: str = "",
        grafana_url: str = "",
    ) -> None:
        self._further_check = further_check
        self._store = store
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpobs-watch", daemon=True)
        self._problem: str | None = None
        self._checked_at = time.monotonic()
        ProcessCollector(registry=registry)
        names = ["version", "public_url", "grafana_url"]
        info = Gauge("ddpobs_server_info", "1; version and addresses are labels.", names, registry=registry)
        info.labels(ddpobs.__version__, public_url, grafana_url).set(1)
        up = Gauge("ddpobs_server_database_up", "1 while the database answers and accepts batches.", registry=registry)
        up.set_function(lambda: self.problem is None)
        self._answer_s = Gauge(
            "ddpobs_server_database_answer_seconds", "Time of the database's last answer.", registry=registry
        )
        self._skew_s = Gauge(
            "ddpobs_server_clock_skew_seconds", "The database's clock minus this machine's.", registry=registry
        )
        self._size = Gauge("ddpobs_server_store_bytes", "Size of the database on disk.", registry=registry)
        self._disk = Gauge(
            "ddpobs_server_disk_bytes", "The file system that holds a SQLite file.", ["what"], registry=registry
        )
        self._lag_s = Histogram(
            "ddpobs_server_event_loop_lag_seconds",
            "Delay with which the event loop wakes from a sleep.",
            buckets=_LAGS_S,
            registry=registry,
        )

    @property
    def database_answers(self) -> bool:
        """Whether reads succeed: the last check is recent, and it failed at most for want of space."""
        return self.problem is None or self.problem == _FULL

    @property
    def problem(self) -> str | None:
        """The reason why acknowledged batches might not be found later; None if the last check succeeded."""
        if time.monotonic() - self._checked_at > _PERIOD_S + _HANGING_S:
            return "the database does not answer"
        return self._problem

    def start(self) -> None:
        """Check once, then start the thread."""
        self._check()
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join(_CLOSE_S)

    async def measure_lag(self) -> None:
        """Measure the event loop's delay until cancelled; runs on the same loop."""
        while True:
            due = time.monotonic() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self._lag_s.observe(max(0.0, time.monotonic() - due))

    def _check(self) -> None:
        began = time.monotonic()
        try:
            skew_s = self._store.now_ns() / 1e9 - time.time()
            self._answer_s.set(time.monotonic() - began)
            self._skew_s.set(skew_s)
            self._store.check_health()
            self._further_check()
            self._problem = None
        except LostDatabaseError as error:
            self._problem = "the database's file was removed, replaced or damaged"
            _log.error("nothing is stored: %s", error)
        except OtherSchemaError as error:
            self._problem = "another version changed the database's schema"
            _log.error("nothing is stored: %s", error)
        except UnavailableError as error:
            self._problem = _FULL if error.full else f"the database does not accept a batch: {type(error).__name__}"
            _log.error("the database does not answer or accept a batch: %s", error)
        except Exception as error:
            self._problem = f"the database does not accept a batch: {type(error).__name__}"
            _log.error("the database does not answer or accept a batch: %s: %s", type(error).__name__, error)
        self._checked_at = time.monotonic()
        if self._problem is None:
            self._measure_size()
        try:
            self._check_disk()
        except OSError as error:
            _log.error("the database's disk cannot be read: %s", error)

    def _measure_size(self) -> None:
        """Measure the database. While a cluster's node is away its size is unknown, but runs of other nodes go on."""
        try:
            self._size.set(self._store.size_bytes())
        except Exception as error:
            _log.warning("the database's size is unknown: %s", error)

    def _check_disk(self) -> None:
        if (folder := self._store.folder) is not None and folder.is_dir():
            disk = shutil.disk_usage(folder)
            self._disk.labels("free").set(disk.free)
            self._disk.labels("all").set(disk.total)

    def _run(self) -> None:
        while not self._closing.wait(_PERIOD_S):
            self._check()
