"""Removes old data once a minute on a thread: spans before sums, oldest first."""

from __future__ import annotations

import logging
import threading
import time

from prometheus_client import CollectorRegistry, Counter, Gauge

from ddpobs_server.settings import Settings
from ddpobs_server.store import Store
from ddpobs_server.web.workspace_limits import effective_limits

_log = logging.getLogger(__name__)
_PERIOD_S = 60.0
_CLOSE_S = 5.0
_PAUSE_RATIO = 1.0
"""Pause after each join of chunks, relative to the join's duration: batches wait while the job writes."""
_HOUR_NS, _DAY_NS = 3600 * 10**9, 86_400 * 10**9


class RetentionJob:
    """Keeps the store within the settings' ages and size. Several collectors on a database may each run a job.

    Args:
        settings: `keep_spans_days`, `keep_runs_days` and `keep_gb`; without any of them no run or span is removed.
        store: The store.
        registry: Receives the job's metrics.
    """

    def __init__(self, settings: Settings, store: Store, registry: CollectorRegistry) -> None:
        self._settings, self._store = settings, store
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpobs-retention", daemon=True)
        self.removed = Counter("ddpobs_server_removed", "Chunks and runs removed.", ["what"], registry=registry)
        self.failures = Counter("ddpobs_server_retention_failures", "Failed rounds.", registry=registry)
        self.seconds = Gauge("ddpobs_server_retention_seconds", "Duration of the last round.", registry=registry)
        self.succeeded = Gauge(
            "ddpobs_server_retention_success_timestamp_seconds",
            "End of the last successful round, Unix time.",
            registry=registry,
        )
        self.bytes = Gauge(
            "ddpobs_server_retention_bytes", "Used size, and the limit keep_gb.", ["what"], registry=registry
        )
        self.joined = Counter("ddpobs_server_joined_chunks", "Chunks joined into larger chunks.", registry=registry)
        for kind in ("chunks", "runs"):
            self.removed.labels(kind)
        self.bytes.labels("used")

    def start(self) -> None:
        """Start the thread."""
        self.succeeded.set_to_current_time()
        self._thread.start()

    def close(self) -> None:
        """End the thread. Wait a moment for the current round; its open transaction is rolled back otherwise."""
        self._closing.set()
        self._thread.join(_CLOSE_S)

    def run_once(self, now_ns: int) -> None:
        """Run a round: remove by age, remove by size, then join small chunks."""
        settings, store, began = self._settings, self._store, time.monotonic()
        if settings.keep_spans_days is not None:
            self._count_removed("chunks", store.expire_chunks(now_ns - int(settings.keep_spans_days * _DAY_NS)))
        store.prune_unused_sets(now_ns - _HOUR_NS)
        self._keep_workspaces(now_ns)
        if settings.keep_gb is not None:
            chunks, runs = store.shrink(int(settings.keep_gb * 1e9))
            self._count_removed("chunks", chunks)
            self._count_removed("runs", runs)
            self.bytes.labels("limit").set(settings.keep_gb * 1e9)
            self.bytes.labels("used").set(store.used_bytes())
        self._compact(now_ns - int(10 * _PERIOD_S * 1e9))
        self.seconds.set(time.monotonic() - began)
        self.succeeded.set_to_current_time()

    def _keep_workspaces(self, now_ns: int) -> None:
        """Remove runs and columns beyond each workspace's own age and size."""
        stored = self._store.workspace_limits()
        for workspace in self._store.workspace_usage():
            limits = effective_limits(self._settings, stored.get(workspace, {}))
            if limits.keep_runs_days is not None:
                before_ns = now_ns - int(limits.keep_runs_days * _DAY_NS)
                self._count_removed("runs", self._store.expire_runs(before_ns, workspace))
            if limits.keep_gb is not None:
                chunks, runs = self._store.shrink(int(limits.keep_gb * 1e9), workspace)
                self._count_removed("chunks", chunks)
                self._count_removed("runs", runs)

    def _compact(self, since_ns: int) -> None:
        began = time.monotonic()
        for joined in self._store.compact(since_ns):
            self.joined.inc(joined)
            if self._closing.wait(_PAUSE_RATIO * (time.monotonic() - began)):
                return
            began = time.monotonic()

    def _count_removed(self, kind: str, count: int) -> None:
        self.removed.labels(kind).inc(count)
        if count:
            _log.info("retention removed data", extra={"what": kind, "count": count})

    def _run(self) -> None:
        while not self._closing.wait(_PERIOD_S):
            try:
                self.run_once(time.time_ns())
            except Exception:
                self.failures.inc()
                _log.exception("retention failed; the next round starts in %d s", _PERIOD_S)
