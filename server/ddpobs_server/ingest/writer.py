"""The one writer thread: many batches in one transaction."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ddpobs import wire
from ddpobs_server.ingest.route import _log
from ddpobs_server.ingest.upload import Upload
from ddpobs_server.store import Arrival, Outcome, Store, UnavailableError, UnstorableBatchError
from ddpobs_server.web.problems import Problem

_GROUP = 64
"""Most batches in one transaction."""


_GROUP_RECORDS = 2**18
"""Nor does one take another batch once it has so many records: their columns are joined in memory."""


_CLOSE_S = 10


_Answer = asyncio.Future[Outcome]


_AGES_S = (0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0, 86_400.0)


class Writer:
    """The one thread that writes. Requests wait for their batch's commit, not for a transaction of their own.

    Args:
        store: Where batches go.
        limit: Batches that may wait; more are refused with a retryable answer.
        registry: Takes the writer's metrics.
    """

    def __init__(self, store: Store, limit: int, registry: CollectorRegistry) -> None:
        self._store = store
        self._limit = limit
        self._waiting: queue.SimpleQueue[tuple[Upload, _Answer] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ddpobs-writer", daemon=True)
        self.batches = Counter("ddpobs_server_batches", "Batches by outcome.", ["outcome"], registry=registry)
        self.spans = Counter("ddpobs_server_spans", "Bucket spans stored.", registry=registry)
        self.bytes = Counter("ddpobs_server_ingest_bytes", "Bytes of batch bodies taken in.", registry=registry)
        self.seconds = Histogram(
            "ddpobs_server_ingest_seconds", "From a batch's arrival to its commit.", registry=registry
        )
        self.commit_seconds = Histogram(
            "ddpobs_server_commit_seconds", "One transaction of up to 64 batches.", registry=registry
        )
        self.age_seconds = Histogram(
            "ddpobs_server_batch_age_seconds",
            "From a batch's making, by its rank's clock, to its arrival: long where ranks had to wait or to spool.",
            buckets=_AGES_S,
            registry=registry,
        )
        self._began: float | None = None
        for name, text, value in (
            ("queue_depth", "Batches waiting for the writer.", self._waiting.qsize),
            ("queue_limit", "Batches that may wait for the writer.", lambda: limit),
            ("writer_alive", "1 while the thread that writes lives.", self._thread.is_alive),
            ("writer_busy_seconds", "How long the transaction under way has taken.", self._busy_s),
        ):
            Gauge(f"ddpobs_server_{name}", text, registry=registry).set_function(value)
        for outcome in ("stored", "repeated", "conflict", "refused", "busy", "failed"):
            self.batches.labels(outcome)

    @property
    def alive(self) -> bool:
        """Whether what is submitted will be written."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread; its answers go to the event loop that runs here."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """Write what waits, then end the thread. What a database does not take in time was not acknowledged."""
        self._waiting.put(None)
        self._thread.join(_CLOSE_S)

    def submit(self, upload: Upload) -> _Answer:
        """Queue a batch; the future is done after its commit, or raises what the upload does.

        Raises:
            Problem: 503, where too many wait already.
        """
        if self._waiting.qsize() >= self._limit:  # Only the event loop puts any in.
            raise Problem(503, "Busy", f"{self._limit} batches wait to be written; try again", {"Retry-After": "1"})
        future: _Answer = self._loop.create_future()
        self._waiting.put((upload, future))
        return future

    def _run(self) -> None:
        while self._write_next():
            pass

    def _write_next(self) -> bool:
        """Wait for batches and write them; False once the end is among them. Nothing of them is held afterwards."""
        group: list[tuple[Arrival, _Answer]] = []
        records = 0
        # Others come meanwhile: whoever waited for the last commit sends again at once.
        while (item := self._waiting.get()) is not None:
            for arrival, future in self._decoded(*item):
                group.append((arrival, future))
                records += wire.records(arrival.batch)
            if len(group) == _GROUP or records > _GROUP_RECORDS or self._waiting.empty():
                break
        if group:
            self._write(group)
        return item is not None

    def _decoded(self, upload: Upload, future: _Answer) -> Iterator[tuple[Arrival, _Answer]]:
        try:
            yield upload.arrival, future
        except Exception as error:
            self._answer([(future, error)])

    def _write(self, group: list[tuple[Arrival, _Answer]]) -> None:
        self._began = time.monotonic()
        try:
            with self.commit_seconds.time():
                outcomes = self._store.ingest([arrival for arrival, _ in group])
        except UnavailableError as error:
            _log.warning("%d batches were not written, their clients are told to try again: %s", len(group), error)
            self._fail(group, error)
            return
        except Exception as error:
            if len(group) > 1:
                # One bad batch must not take the others' transaction with it, nor cost each of them one of its own.
                middle = len(group) // 2
                for half in (group[:middle], group[middle:]):
                    self._write(half)
                return
            run, source, seq = group[0][0].key
            if isinstance(error, UnstorableBatchError):
                self._fail(group, error, "refused")
                return
            _log.exception("a batch was not written", extra={"run": run, "source": source, "seq": seq})
            self._fail(group, error)
            return
        finally:
            self._began = None
        for (arrival, _), outcome in zip(group, outcomes, strict=True):
            self._count(arrival, outcome)
        self._answer([(future, outcome) for (_, future), outcome in zip(group, outcomes, strict=True)])

    def _busy_s(self) -> float:
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def _fail(self, group: list[tuple[Arrival, _Answer]], error: Exception, outcome: str = "failed") -> None:
        self.batches.labels(outcome).inc(len(group))
        self._answer([(future, error) for _, future in group])

    def _answer(self, answers: list[tuple[_Answer, Outcome | Exception]]) -> None:
        with suppress(RuntimeError):  # The loop has ended, and with it everyone who asked.
            self._loop.call_soon_threadsafe(_settle, answers)

    def _count(self, arrival: Arrival, outcome: Outcome) -> None:
        self.batches.labels(outcome.value).inc()
        self.seconds.observe(max(0.0, (time.time_ns() - arrival.received_ns) / 1e9))
        self.age_seconds.observe(max(0.0, (arrival.received_ns - arrival.batch.anchor.wall_ns) / 1e9))
        if outcome is Outcome.STORED:
            self.bytes.inc(arrival.size_bytes)
            self.spans.inc(0 if arrival.batch.spans is None else len(arrival.batch.spans))


def _settle(answers: list[tuple[_Answer, Outcome | Exception]]) -> None:
    for future, answer in answers:
        if future.done():  # Whoever asked has gone meanwhile; the batch is stored all the same.
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
