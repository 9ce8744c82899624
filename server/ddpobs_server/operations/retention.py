"""Removes old data once a minute on a thread, spans before sums, oldest first; joins chunks, makes bins of steps."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from ddpobs_server.operations.bins_in_turns import BinsInTurns
from ddpobs_server.operations.clock_guard import ClockGuard
from ddpobs_server.settings import Settings
from ddpobs_server.store import Store, UnavailableError
from ddpobs_server.web.run_faults import RunFaults
from ddpobs_server.web.workspace_limits import Limits, effective_limits

_log = logging.getLogger(__name__)
_PERIOD_S = 60.0
_CLOSE_S = 5.0
_PAUSE_RATIO = 1.0
"""Pause after each join of chunks, relative to the join's duration: batches wait while the job writes."""
_DELETED_DAYS = 400
"""Days for which the sources of a deleted run are refused: longer than any training."""
_HOUR_NS, _DAY_NS = 3600 * 10**9, 86_400 * 10**9


_JUMPED, _LARGE = "the clock jumped", "it would remove too much"


class RetentionRefusedError(Exception):
    """A round removed nothing by age, because the clock may be wrong; the message has the remedy."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"retention by age is refused, because {reason}: {detail}")
        self.reason = reason


class RetentionJob:
    """Keeps the store within the settings' ages and size. Several collectors on a database may each run a job.

    A clock that is wrong would remove every run by age. A round therefore refuses if the wall clock was set since the
    last round. The first round also refuses to remove more than `keep_share` of the data. After an accepted round,
    data can only become due as time passes.

    Args:
        settings: `keep_spans_days`, `keep_runs_days` and `keep_gb`; without any of them no run or span is removed.
        store: The store.
        registry: Receives the job's metrics.
        faults: Contains the errors of single runs.
    """

    def __init__(
        self, settings: Settings, store: Store, registry: CollectorRegistry, faults: RunFaults | None = None
    ) -> None:
        self._settings, self._store, self._faults = settings, store, faults or RunFaults()
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
        self.refused = Gauge(
            "ddpobs_server_retention_refused",
            "1 while nothing is removed by age, because the clock may be wrong.",
            ["reason"],
            registry=registry,
        )
        for reason in (_JUMPED, _LARGE):
            self.refused.labels(reason)
        self.clock, self._accepted = ClockGuard(), False
        self._bins = BinsInTurns(store, registry, self._faults)
        self.lost = Counter(
            "ddpobs_server_removed_unbinned_chunks",
            "Chunks of steps removed before their bins were made.",
            registry=registry,
        )
        self.joined = Counter("ddpobs_server_joined_chunks", "Chunks joined into larger chunks.", registry=registry)
        for kind in ("chunks", "runs"):
            self.removed.labels(kind)
        self.bytes.labels("used")

    def start(self) -> None:
        """Start the thread."""
        self.succeeded.set_to_current_time()
        self.clock.accept(time.time_ns())
        self._thread.start()

    def close(self) -> None:
        """End the thread. Wait a moment for the current round; its open transaction is rolled back otherwise."""
        self._closing.set()
        self._thread.join(_CLOSE_S)

    def run_once(self, now_ns: int) -> None:
        """Run a round: remove by age, remove by size, then join small chunks.

        Raises:
            RetentionRefusedError: Nothing was removed by age; the rest of the round is done.
        """
        settings, store, began = self._settings, self._store, time.monotonic()
        stored = store.workspace_limits()
        limits = {name: effective_limits(settings, stored.get(name, {})) for name in store.runs_by_workspace()}
        by_size = settings.keep_gb is not None or any(own.keep_gb is not None for own in limits.values())
        if settings.keep_spans_days is not None or by_size:
            self._update_step_bins(now_ns)  # Bins come from the columns that are removed next.
        refusal = self._remove_by_age(now_ns, limits)
        self._shrink_workspaces(limits)
        if settings.keep_gb is not None:
            chunks, runs = store.shrink(int(settings.keep_gb * 1e9), lost=self._report_lost)
            self._count_removed("chunks", chunks)
            self._count_removed("runs", runs)
            self.bytes.labels("limit").set(settings.keep_gb * 1e9)
            self.bytes.labels("used").set(store.used_bytes())
        store.prune_audit_log(settings.audit_entries)
        self._compact(now_ns - int(10 * _PERIOD_S * 1e9))
        self._update_step_bins(now_ns)
        if refusal is not None:
            raise refusal
        self.seconds.set(time.monotonic() - began)
        self.succeeded.set_to_current_time()

    def _remove_by_age(self, now_ns: int, limits: Mapping[str, Limits]) -> RetentionRefusedError | None:
        settings, store = self._settings, self._store
        before_ns = {
            workspace: now_ns - int(own.keep_runs_days * _DAY_NS)
            for workspace, own in limits.items()
            if own.keep_runs_days is not None
        }
        refusal = self._refusal(now_ns, before_ns)
        for reason in (_JUMPED, _LARGE):
            self.refused.labels(reason).set(refusal is not None and refusal.reason == reason)
        if refusal is not None:
            return refusal
        if settings.keep_spans_days is not None:
            age_ns = int(settings.keep_spans_days * _DAY_NS)
            limits_ns = now_ns - age_ns, now_ns - max(2 * age_ns, age_ns + _DAY_NS)
            guard = partial(self._faults.contained, "retention")
            self._count_removed("chunks", store.expire_chunks(*limits_ns, guard=guard, lost=self._report_lost))
        store.prune_unused_sets(now_ns - _HOUR_NS)
        for workspace, silent_before_ns in before_ns.items():
            self._count_removed("runs", store.expire_runs(silent_before_ns, workspace))
        store.forget_deleted(now_ns - _DELETED_DAYS * _DAY_NS)
        self.clock.accept(now_ns)
        self._accepted = True
        return None

    def _refusal(self, now_ns: int, before_ns: Mapping[str, int]) -> RetentionRefusedError | None:
        """The reason against removal by age; `before_ns` is the time before which each workspace's silent runs go."""
        settings = self._settings
        if (jump_s := self.clock.jump_s(now_ns)) != 0:
            detail = (
                f"this machine's clock was set by {jump_s:+,.0f} s since the last round: set it back, or restart the "
                "collector if it is right now"
            )
            return RetentionRefusedError(_JUMPED, detail)
        if self._accepted:
            return None
        ages = {f"{(now_ns - limit_ns) / _DAY_NS:g} days" for limit_ns in before_ns.values()}
        runs_age = ages.pop() if len(ages) == 1 else "their workspaces keep them"
        shares = [(runs_age, self._store.silent_runs_share(before_ns))]
        if (days := settings.keep_spans_days) is not None:
            shares.append((f"{days:g} days", self._store.silent_bytes_share(now_ns - int(days * _DAY_NS))))
        for age, share in shares:
            if share > settings.keep_share:
                detail = (
                    f"{share:.0%} of the data are older than {age}. If this machine's clock is right, set "
                    "DDPOBS_SERVER_KEEP_SHARE=1 and restart the collector"
                )
                return RetentionRefusedError(_LARGE, detail)
        return None

    def _shrink_workspaces(self, limits: Mapping[str, Limits]) -> None:
        """Remove data of workspaces above their own size."""
        for workspace, own in limits.items():
            if own.keep_gb is not None:
                chunks, runs = self._store.shrink(int(own.keep_gb * 1e9), workspace, lost=self._report_lost)
                self._count_removed("chunks", chunks)
                self._count_removed("runs", runs)

    def _compact(self, since_ns: int) -> None:
        began = time.monotonic()
        for joined in self._store.compact(since_ns, partial(self._faults.contained, "compaction")):
            self.joined.inc(joined)
            if self._closing.wait(_PAUSE_RATIO * (time.monotonic() - began)):
                return
            began = time.monotonic()

    def _update_step_bins(self, now_ns: int) -> None:
        self._bins.run(now_ns, lambda took_s: self._closing.wait(_PAUSE_RATIO * took_s))

    def _report_lost(self, run: str, chunks: int) -> None:
        """Report columns that were removed without their bins: beyond twice their age, or for room."""
        if chunks:
            self.lost.inc(chunks)
            _log.warning("steps of run %s were removed before their bins were made", run, extra={"count": chunks})

    def _count_removed(self, kind: str, count: int) -> None:
        self.removed.labels(kind).inc(count)
        if count:
            _log.info("retention removed data", extra={"what": kind, "count": count})

    def _run(self) -> None:
        while not self._closing.wait(_PERIOD_S):
            try:
                self.run_once(time.time_ns())
            except RetentionRefusedError as refusal:
                self.failures.inc()
                _log.error("%s", refusal)
            except UnavailableError as error:
                self.failures.inc()
                _log.error("retention did not finish: %s; the next round starts in %d s", error, _PERIOD_S)
            except Exception:
                self.failures.inc()
                _log.exception("retention failed; the next round starts in %d s", _PERIOD_S)
