"""What goes, and when: spans before sums, the oldest first. One thread, once a minute."""

from __future__ import annotations

import logging
import threading
import time

from prometheus_client import CollectorRegistry, Counter, Gauge

from ddpobs_server.settings import Settings
from ddpobs_server.store import Store

_log = logging.getLogger(__name__)
_EVERY_S = 60.0
_CLOSE_S = 5.0
_REST = 1.0
"""After it joined chunks the keeper rests so many times as long as that took: batches wait for whoever writes."""
_HOUR_NS, _DAY_NS = 3600 * 10**9, 86_400 * 10**9


class RetentionJob:
    """Holds the store to the settings' ages and size. Several collectors on one database may each have one.

    Args:
        settings: `keep_spans_days`, `keep_runs_days` and `keep_gb`; without any of them nothing goes.
        store: What is kept.
        registry: Takes the keeper's metrics.
    """

    def __init__(self, settings: Settings, store: Store, registry: CollectorRegistry) -> None:
        self._settings, self._store = settings, store
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpobs-retention", daemon=True)
        self.removed = Counter("ddpobs_server_removed", "What retention removed.", ["what"], registry=registry)
        self.failures = Counter("ddpobs_server_retention_failures", "Rounds that failed.", registry=registry)
        self.seconds = Gauge("ddpobs_server_retention_seconds", "How long the last round took.", registry=registry)
        self.succeeded = Gauge(
            "ddpobs_server_retention_success_timestamp_seconds",
            "When the last round that did not fail ended, Unix time.",
            registry=registry,
        )
        self.bytes = Gauge(
            "ddpobs_server_retention_bytes", "What counts against keep_gb, and that limit.", ["what"], registry=registry
        )
        self.joined = Counter("ddpobs_server_joined_chunks", "Chunks that went into larger ones.", registry=registry)
        for what in ("chunks", "runs"):
            self.removed.labels(what)
        self.bytes.labels("used")

    def start(self) -> None:
        """Start the thread."""
        self.succeeded.set_to_current_time()
        self._thread.start()

    def close(self) -> None:
        """End it; a round under way is waited for a moment, and undone by its transaction otherwise."""
        self._ended.set()
        self._thread.join(_CLOSE_S)

    def run_once(self, now_ns: int) -> None:
        """One round: what is too old, then what is too much, then what came in small pieces."""
        settings, store, began = self._settings, self._store, time.monotonic()
        if settings.keep_spans_days is not None:
            self._note("chunks", store.expire_chunks(now_ns - int(settings.keep_spans_days * _DAY_NS)))
        store.prune_unused_sets(now_ns - _HOUR_NS)
        if settings.keep_runs_days is not None:
            self._note("runs", store.expire_runs(now_ns - int(settings.keep_runs_days * _DAY_NS)))
        if settings.keep_gb is not None:
            chunks, runs = store.shrink(int(settings.keep_gb * 1e9))
            self._note("chunks", chunks)
            self._note("runs", runs)
            self.bytes.labels("limit").set(settings.keep_gb * 1e9)
            self.bytes.labels("used").set(store.used_bytes())
        self._compact(now_ns - int(10 * _EVERY_S * 1e9))
        self.seconds.set(time.monotonic() - began)
        self.succeeded.set_to_current_time()

    def _compact(self, since_ns: int) -> None:
        began = time.monotonic()
        for joined in self._store.compact(since_ns):
            self.joined.inc(joined)
            if self._ended.wait(_REST * (time.monotonic() - began)):
                return
            began = time.monotonic()

    def _note(self, what: str, count: int) -> None:
        self.removed.labels(what).inc(count)
        if count:
            _log.info("retention removed some", extra={"what": what, "count": count})

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            try:
                self.run_once(time.time_ns())
            except Exception:
                self.failures.inc()
                _log.exception("retention failed; it is tried again in %d s", _EVERY_S)
