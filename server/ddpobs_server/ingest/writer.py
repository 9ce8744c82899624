"""The writer thread: commits many batches in one transaction.

The event loop reads body and key. The one writer thread decodes, checks and stores up to 64 batches in a transaction.
Decoding on a second thread cost half as much processor time again: the interpreter moved between two cores forty times
per batch.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ddpobs import wire
from ddpobs_server.ingest.series_ledger import SeriesLedger
from ddpobs_server.ingest.upload import Upload
from ddpobs_server.store import Arrival, DeletedRunError, Outcome, Store, UnavailableError, UnstorableBatchError
from ddpobs_server.web.fair_queue import FairQueue
from ddpobs_server.web.problems import Problem
from ddpobs_server.web.workspace_limits import WorkspaceLimits

_log = logging.getLogger(__name__)
_GROUP_BATCHES = 64
"""Maximum number of batches in one transaction."""
_GROUP_RECORDS = 2**18
"""Records after which a transaction takes no further batch: their columns are joined in memory."""
_SHARED_BATCHES, _SHARED_RECORDS = 8, 2**14
"""The same while several workspaces send: a batch waits for a whole transaction of another workspace."""
_MAX_DELETED = 10_000
_CLOSE_S = 10
_AGES_S = (0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0, 86_400.0)
_Acknowledgement = asyncio.Future[Outcome]
_Group = list[tuple[Arrival, _Acknowledgement]]


class Writer:
    """The only thread that writes batches. A request waits for the transaction that contains its batch.

    Args:
        store: Stores the batches.
        limit: Batches that may wait; further ones are refused with a retryable problem.
        limits: Share of these places for each workspace.
        series: Refuses batches with too many series.
        registry: Receives the writer's metrics.
    """

    def __init__(
        self, store: Store, limit: int, limits: WorkspaceLimits, series: SeriesLedger, registry: CollectorRegistry
    ) -> None:
        self._store, self._limit, self._limits, self._series = store, limit, limits, series
        self.queue: FairQueue[tuple[Upload, _Acknowledgement]] = FairQueue()
        self._thread = threading.Thread(target=self._run, name="ddpobs-writer", daemon=True)
        self._transaction_began: float | None = None
        self._deleted: dict[tuple[str, str], None] = {}
        """Runs and attempts that were refused because their run was deleted."""
        self._create_metrics(registry)

    def _create_metrics(self, registry: CollectorRegistry) -> None:
        self.batches = Counter("ddpobs_server_batches", "Batches by outcome.", ["outcome"], registry=registry)
        self.spans = Counter("ddpobs_server_spans", "Bucket spans stored.", registry=registry)
        self.bytes = Counter("ddpobs_server_ingest_bytes", "Bytes of stored batch bodies.", registry=registry)
        self.seconds = Histogram(
            "ddpobs_server_ingest_seconds", "From a batch's arrival to its commit.", registry=registry
        )
        self.commit_seconds = Histogram(
            "ddpobs_server_commit_seconds", "One transaction of up to 64 batches.", registry=registry
        )
        self.age_seconds = Histogram(
            "ddpobs_server_batch_age_seconds",
            "From a batch's creation, by its rank's clock, to its arrival; long if the rank had to wait or to spool.",
            buckets=_AGES_S,
            registry=registry,
        )
        for name, text, value in (
            ("queue_depth", "Batches waiting for the writer.", self.queue.qsize),
            ("queue_limit", "Batches that may wait for the writer.", lambda: self._limit),
            ("writer_alive", "1 while the writer thread is alive.", self._thread.is_alive),
            ("writer_busy_seconds", "Duration of the current transaction so far.", self._busy_s),
        ):
            Gauge(f"ddpobs_server_{name}", text, registry=registry).set_function(value)
        for outcome in ("stored", "repeated", "conflict", "refused", "busy", "failed"):
            self.batches.labels(outcome)

    @property
    def alive(self) -> bool:
        """Whether submitted batches will be written."""
        return self._thread.is_alive()

    def used_ratio(self) -> float:
        """Used part of the queue, or of the share of the workspace that uses most of its own."""
        shares = (size / self._limits.share(workspace) for workspace, size in self.queue.sizes().items())
        return max(self.queue.qsize(), *shares, 0.0) / self._limit

    def start(self) -> None:
        """Start the thread; call it on the event loop that awaits the batches."""
        self._loop = asyncio.get_running_loop()
        self._is_distributed = self._store.is_distributed()
        self._thread.start()

    def close(self) -> None:
        """Write the waiting batches, then end the thread.

        Batches that the database does not take within `_CLOSE_S` stay unacknowledged.
        """
        self.queue.close()
        self._thread.join(_CLOSE_S)

    def submit(self, upload: Upload, workspace: str) -> _Acknowledgement:
        """Queue a batch.

        Returns:
            A future that is done after the commit. It raises the errors of `Upload.arrival` and of the store.

        Raises:
            Problem: 503 if too many batches wait already, of all workspaces or of this one.
        """
        allowed = max(1, int(self._limit * self._limits.share(workspace)))
        if self.queue.size_of(workspace) >= allowed:
            detail = f"{allowed} batches of workspace {workspace} wait to be written; try again"
            raise Problem(503, "Busy", detail, {"Retry-After": "1"})
        if self.queue.qsize() >= self._limit:  # Only the event loop adds batches.
            raise Problem(503, "Busy", f"{self._limit} batches wait to be written; try again", {"Retry-After": "1"})
        future: _Acknowledgement = self._loop.create_future()
        self.queue.put(workspace, (upload, future))
        return future

    def _run(self) -> None:
        while self._write_next():
            pass

    def _write_next(self) -> bool:
        """Wait for batches and write them; return False after `close`.

        The batches are local to this method, so that their memory is free while the writer waits for the next ones.
        """
        group: _Group = []
        workspaces: set[str] = set()
        records = 0
        # Further batches arrive during this loop: clients that waited for the last commit send again at once.
        while (taken := self.queue.get()) is not None:
            workspace, item = taken
            workspaces.add(workspace)
            for arrival, future in self._decode(*item):
                group.append((arrival, future))
                records += wire.records(arrival.batch)
            batches_limit, records_limit = self._transaction_limits()
            if len(group) >= batches_limit or records > records_limit or not self.queue.qsize():
                break
            if len(workspaces) > 1 and self.queue.size_of(workspace) == 0:
                break  # A workspace with few batches does not wait for many of another.
        for part in self._transactions(group):
            self._write(part)
        return taken is not None

    def _transactions(self, group: _Group) -> Iterable[_Group]:
        """The batches of each transaction; one for each run in a cluster.

        Runs are on different nodes. They would commit in two phases, and a connection lost in between leaves locks.
        """
        if not self._is_distributed:
            return [group] if group else []
        by_run: dict[str, _Group] = {}
        for arrival, future in group:
            by_run.setdefault(arrival.batch.run, []).append((arrival, future))
        return by_run.values()

    def _transaction_limits(self) -> tuple[int, int]:
        """Most batches, and records after which a transaction takes no further batch."""
        if self.queue.is_shared():
            return _SHARED_BATCHES, _SHARED_RECORDS
        return _GROUP_BATCHES, _GROUP_RECORDS

    def _decode(self, upload: Upload, future: _Acknowledgement) -> Iterator[tuple[Arrival, _Acknowledgement]]:
        try:
            arrival = upload.arrival
            attempt = arrival.batch.run, arrival.batch.attempt
            if attempt in self._deleted:
                raise DeletedRunError(*attempt)
            self._series.check(arrival.batch)
            yield arrival, future
        except Exception as error:
            self._settle([(future, error)])

    def _write(self, group: _Group) -> None:
        self._transaction_began = time.monotonic()
        try:
            with self.commit_seconds.time():
                outcomes = self._store.ingest([arrival for arrival, _ in group])
        except UnavailableError as error:
            _log.warning("%d batches were not written; their clients will send them again: %s", len(group), error)
            self._fail(group, error)
        except Exception as error:
            self._isolate_failure(group, error)
        else:
            self._count([arrival for arrival, _ in group], outcomes)
            for arrival, _ in group:
                self._series.stored(arrival.batch)
            self._settle([(future, outcome) for (_, future), outcome in zip(group, outcomes, strict=True)])
        finally:
            self._transaction_began = None

    def _isolate_failure(self, group: _Group, error: Exception) -> None:
        """Write the halves of a group whose transaction failed; report the error if the group is one batch.

        One bad batch must not fail the other batches, and halving needs fewer transactions than one for each batch.
        """
        if len(group) > 1:
            middle = len(group) // 2
            for half in (group[:middle], group[middle:]):
                self._write(half)
        elif isinstance(error, UnstorableBatchError):
            if isinstance(error, DeletedRunError):
                self._remember_deleted(error)
            self._fail(group, error, "refused")
        else:
            run, source, seq = group[0][0].key
            _log.error("a batch was not written", exc_info=error, extra={"run": run, "source": source, "seq": seq})
            self._fail(group, error)

    def _remember_deleted(self, error: DeletedRunError) -> None:
        """Refuse further batches of the attempt at once: each would fail the transaction of a group."""
        self._deleted[error.run, error.attempt] = None
        if len(self._deleted) > _MAX_DELETED:
            del self._deleted[next(iter(self._deleted))]

    def _busy_s(self) -> float:
        began = self._transaction_began
        return 0.0 if began is None else time.monotonic() - began

    def _fail(self, group: _Group, error: Exception, outcome: str = "failed") -> None:
        self.batches.labels(outcome).inc(len(group))
        for arrival, _ in group:
            self._series.forget(arrival.batch)
        self._settle([(future, error) for _, future in group])

    def _settle(self, results: list[tuple[_Acknowledgement, Outcome | Exception]]) -> None:
        with suppress(RuntimeError):  # The event loop has ended, and all waiting requests with it.
            self._loop.call_soon_threadsafe(_set_results, results)

    def _count(self, arrivals: Sequence[Arrival], outcomes: Sequence[Outcome]) -> None:
        now_ns = time.time_ns()
        for outcome in set(outcomes):
            self.batches.labels(outcome.value).inc(outcomes.count(outcome))
        for arrival in arrivals:
            self.seconds.observe(max(0.0, (now_ns - arrival.received_ns) / 1e9))
            self.age_seconds.observe(max(0.0, (arrival.received_ns - arrival.batch.anchor.wall_ns) / 1e9))
        stored = [arrival for arrival, outcome in zip(arrivals, outcomes, strict=True) if outcome is Outcome.STORED]
        self.bytes.inc(sum(arrival.size_bytes for arrival in stored))
        self.spans.inc(sum(len(arrival.batch.spans or ()) for arrival in stored))


def _set_results(results: list[tuple[_Acknowledgement, Outcome | Exception]]) -> None:
    for future, result in results:
        if future.done():  # The client has disconnected; its batch is stored all the same.
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
