"""Export of finished steps as encoded batches: one bounded queue, one daemon thread.

`offer` never blocks. The thread builds batches from the queue and passes them to the delivery, which has its own thread
for operations that may hang. Lost records are counted, and every batch carries the count.

While this thread holds the GIL, a gradient hook may wait, and every other rank waits with it. Delays at different
moments would add up over the ranks. So the threads of all ranks wake at the same multiples of the period by the wall
clock, as in Petrini, Kerbyson and Pakin, "The case of the missing supercomputer performance" (SC 2003).

The thread sleeps until something is due, about every two seconds: each wake-up evicts the training thread's caches,
which cost 0.6 ms of the tiny model's next two steps. A pulse travels with the next batch and replaces an unsent one. A
step whose CUDA events have not passed stays in the queue; the thread does not wait for it. A fork waits, for a moment,
until the thread rests. Both threads import and create everything they need before they start.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import zstandard

from ddpobs import wire
from ddpobs.clocks import anchor
from ddpobs.config import TelemetryConfig
from ddpobs.export.delivery import Delivery, Once
from ddpobs.export.http_sender import Answer
from ddpobs.export.identity import Envelope, Identity
from ddpobs.export.spool import Encoded

_SLACK_S = 0.02
"""Work that is due within this time is done at once, so that the thread wakes up less often."""
_SLOTS_PER_BATCH = 1024
_FORK_PAUSE_S = 0.25
"""Longest time that a fork waits for the thread to pause."""
DONE = object()
"""Return value of a periodic call that ends its repetition."""


@dataclass
class _Periodic:
    seconds: float
    call: Callable[[], object]
    due: float


class _Queued(NamedTuple):
    """An element of the queue: a record, its count of wire records, and the slots that it takes."""

    record: object
    weight: int
    slots: int


class Exporter:
    """Queue and thread that export the records of a training process.

    Args:
        config: Addresses, limits and times.
        encoder: Builds a batch from offered records; runs on the telemetry thread.
        ready: Whether the encoder can process a record without waiting for a device. Later records wait behind a record
            that is not ready.

    Attributes:
        emitted: Records offered so far.
        dropped: Records lost so far: the queue or the spool was full, or the collector refused them.
        all_delivered: Whether the exporter is closed and no batch of this process waits on disk.
    """

    def __init__(
        self,
        config: TelemetryConfig,
        encoder: Callable[[Sequence[object], Envelope], wire.Batch],
        ready: Callable[[object], bool] = lambda _: True,
    ) -> None:
        self._config, self._encoder, self._ready = config, encoder, ready
        self._queue: deque[_Queued] = deque()
        self._slots = 0
        self._weight = 0
        self._latest: object = None
        self._is_urgent = False
        self._flush_due = _next(config.flush_s)
        self._identity: Identity | None = None
        self._periodic: list[_Periodic] = []
        self._seq = 0
        self._warn = Once()
        self._delivery = Delivery(config, self.count_lost, self._warn)
        self._work_lock = threading.RLock()
        """Locked by the thread while it works. With the lock, another thread finds it outside of any library."""
        self._rounds, self._unpaused_round = 0, -1
        self._wake = threading.Event()
        self._stopping = False
        self._abandoned = False
        self._deadline = 0.0
        self._closed = False
        self.all_delivered = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._count_lock = threading.RLock()
        """Locked for a few additions, microseconds; reentrant, because a finalizer may offer a record meanwhile."""
        self.emitted = 0
        self.dropped = 0
        self._reported_dropped = 0
        _exporters.add(self)

    @property
    def queued_sizes(self) -> list[int]:
        """Sizes of the batches in memory that wait to be sent, in bytes."""
        return self._delivery.queued_sizes

    @property
    def first_answer(self) -> Answer | None:
        """The collector's answer to the first batch; None until it arrives."""
        return self._delivery.first_answer

    def start(self) -> None:
        """Start the threads.

        Raises:
            RuntimeError: The system starts no more threads.
        """
        self._delivery.start()
        thread = threading.Thread(target=self._run, name="ddpobs-telemetry", daemon=True)
        thread.start()
        self._thread = thread

    def offer(self, record: object, weight: int = 1, slots: int = 1) -> bool:
        """Queue a record; returns False if the queue is full and the record was dropped.

        Args:
            record: Input of the encoder.
            weight: Number of wire records that it counts as.
            slots: Number of slots that it takes in the queue.
        """
        if self._closed and threading.current_thread() is not self._thread:
            return False
        with self._count_lock:
            self.emitted += weight
            if self._slots + slots > self._config.queue_records:
                self.dropped += weight
                return False
            self._queue.append(_Queued(record, weight, slots))
            self._slots += slots
            self._weight += weight
        if self._weight >= self._config.batch_spans:
            self._wake.set()
        return True

    def offer_latest(self, record: object, urgent: bool = False) -> None:
        """Send a record with the next batch. It replaces the previous such record, and is not counted.

        Args:
            record: Input of the encoder.
            urgent: Cut a batch in this round of the thread, and send it at once. A periodic call may ask for it.
        """
        if urgent or not self._is_urgent:
            self._latest = record
        self._is_urgent = self._is_urgent or urgent

    def call_every(self, seconds: float, call: Callable[[], object]) -> None:
        """Call a function periodically on the telemetry thread, at the same moments as other ranks.

        Args:
            seconds: The period; the first call is immediate.
            call: Called until it returns `DONE`. Its errors are logged once.
        """
        self._periodic.append(_Periodic(seconds, call, time.monotonic()))

    def count_lost(self, records: int) -> None:
        """Count offered records that will not arrive."""
        with self._count_lock:
            self.dropped += records

    def identify(self, identity: Identity) -> None:
        """Set the identity of the batches; until then, records wait in the queue."""
        self._identity = identity

    def adopt(self, sources: set[str]) -> None:
        """Send the spooled batches of dead processes too."""
        self._delivery.adopt(sources)

    def flush_soon(self) -> None:
        """Cut and send a batch now, on the threads."""
        self._is_urgent = True
        self._wake.set()

    def close(self, timeout_s: float | None = None) -> None:
        """Flush for at most `timeout_s` (default `config.exit_s`); the rest goes to the spool. Never raises."""
        if self._closed:
            return
        self._closed = True
        limit_s = self._config.exit_s if timeout_s is None else timeout_s
        began = time.monotonic()
        self._deadline = began + 0.5 * limit_s
        self._stopping = True
        self._wake.set()
        if os.getpid() != self._pid:
            return
        if self._thread is None:  # It could not start.
            self._delivery.close(self._deadline)
            return
        self._thread.join(0.6 * limit_s)
        if self._thread.is_alive():
            self._abandoned = True  # It hangs in a periodic call, which is its last.
            locked = self._work_lock.acquire(timeout=0.1 * limit_s)
            self._try("batch", self._cut_everything)
            if locked:
                self._work_lock.release()
        spooled = self._try("exit", lambda: self._delivery.close(began + 0.8 * limit_s))
        self.all_delivered = spooled is False
        if spooled:
            self._try("loss", self._report_loss)
        # A return from C++ code, such as a store's, while the interpreter ends would abort the process.
        self._thread.join(max(0.0, began + limit_s - time.monotonic()))

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(self._pause_s())
            self._wake.clear()
            self._rounds += 1
            self._guard("periodic", self._tick)
            self._guard("batch", self._cut_due)
        self._finish()

    def _guard(self, part: str, call: Callable[[], object]) -> object:
        """Run one part of the thread's round, unless the thread is abandoned."""
        with self._work_lock:
            return None if self._abandoned else self._try(part, call)

    def _try(self, part: str, call: Callable[[], object]) -> object:
        """Call a function; an error in it is logged once and does not propagate."""
        try:
            return call()
        except Exception:
            self._warn(part, "telemetry failed (%s); training goes on", part, trace=True)
            return None

    def _pause_s(self) -> float:
        """Return the time until work is due; never zero, because a fork may be waiting for the thread to pause."""
        due = min([self._flush_due, *(periodic.due for periodic in self._periodic)])
        return max(_SLACK_S / 2, due - time.monotonic())

    def _tick(self) -> None:
        soon = time.monotonic() + _SLACK_S
        for periodic in [periodic for periodic in self._periodic if periodic.due <= soon]:
            periodic.due = _next(periodic.seconds)
            if self._try(f"periodic {periodic.call}", periodic.call) is DONE:
                self._periodic.remove(periodic)

    def _cut_due(self) -> None:
        is_due, urgent = self._flush_due <= time.monotonic() + _SLACK_S, self._is_urgent
        flushes = is_due or urgent
        if is_due:
            self._flush_due = _next(self._config.flush_s)
        while self._identity is not None and self._due(flushes):
            self._cut_batch(self._identity)
        self._is_urgent = False
        if urgent:
            self._delivery.hurry()

    def _due(self, flushes: bool) -> bool:
        if self._queue and self._ready(self._queue[0].record):
            return flushes or self._weight >= self._config.batch_spans
        # A latest record alone waits until the collector has accepted the previous batch.
        return flushes and self._latest is not None and (self._is_urgent or self._delivery.idle)

    def _cut_everything(self) -> None:
        while self._identity is not None and self._queue and self._ready(self._queue[0].record):
            self._cut_batch(self._identity)
        if self._identity is not None and self._latest is not None:
            self._cut_batch(self._identity)

    def _report_loss(self) -> None:
        """Spool one more batch that reports the losses since the last one; it may itself displace another batch."""
        while self._identity is not None and self.dropped != self._reported_dropped:
            self._cut_batch(self._identity)

    def _cut_batch(self, identity: Identity) -> None:
        records: list[object] = []
        weight = slots = 0
        while self._queue and weight < self._config.batch_spans:
            if slots + self._queue[0].slots > _SLOTS_PER_BATCH or not self._ready(self._queue[0].record):
                break
            queued = self._queue.popleft()
            records.append(queued.record)
            weight += queued.weight
            slots += queued.slots
        with self._count_lock:
            self._weight -= weight
            self._slots -= slots
        if self._latest is not None:
            records.append(self._latest)
            self._latest = None
        envelope = Envelope(
            **vars(identity), seq=self._seq, emitted=self.emitted, dropped=self.dropped, anchor=anchor()
        )
        self._seq += 1
        self._reported_dropped = envelope.dropped
        try:
            body = zstandard.compress(wire.encode(self._encoder(records, envelope)), 1)
        except Exception:
            self.count_lost(weight)
            self._warn("batch", "telemetry failed (batch); training goes on", trace=True)
            return
        self._delivery.put(Encoded(identity.run, identity.source, envelope.seq, weight, body))

    def _finish(self) -> None:
        """Cut the last batches, once the identity is set and the device has reached the end of the last step."""
        # A rank that ends at once may have finished before rank 0 shared the identity.
        while self._must_wait() and time.monotonic() < self._deadline:
            self._guard("periodic", self._tick)
            time.sleep(_SLACK_S / 2)
        for periodic in self._periodic:
            self._guard(f"periodic {periodic.call}", periodic.call)
        self._guard("batch", self._cut_everything)
        self.count_lost(self._weight)
        if self._identity is None and self._weight:
            self._warn("identity", "lost %d records: the run's id had not arrived when the process ended", self._weight)

    def _must_wait(self) -> bool:
        return self._identity is None or not all(self._ready(queued.record) for queued in list(self._queue))

    def _pause_for_fork(self) -> None:
        """Before a fork, pause the thread until after it, so that the child inherits no lock of the thread's.

        Only one fork waits for a thread that hangs.
        """
        if not self._work_lock.acquire(timeout=0 if self._unpaused_round == self._rounds else _FORK_PAUSE_S):
            self._unpaused_round = self._rounds

    def _resume_after_fork(self) -> None:
        """Continue after a fork, in the parent."""
        with suppress(RuntimeError):  # The thread did not pause.
            self._work_lock.release()

    def _reset_in_child(self) -> None:
        """Reset in a forked child, such as a loader worker: it has no thread, and must not send under the parent's key.

        The queue is kept alive. It may hold CUDA events, and a process that deletes another process's events is ended.
        """
        self._closed, self._thread = True, None
        self._parent_queue, self._queue = self._queue, deque()
        self._count_lock, self._work_lock = threading.RLock(), threading.RLock()


def _next(seconds: float) -> float:
    """Return the `time.monotonic` of the wall clock's next multiple of a period, except one that is already due."""
    soon = time.time() + _SLACK_S
    return time.monotonic() + _SLACK_S + seconds - soon % seconds


_exporters: weakref.WeakSet[Exporter] = weakref.WeakSet()


def _for_each(action: Callable[[Exporter], None]) -> Callable[[], None]:
    def act() -> None:
        for exporter in list(_exporters):
            action(exporter)

    return act


os.register_at_fork(
    before=_for_each(Exporter._pause_for_fork),
    after_in_parent=_for_each(Exporter._resume_after_fork),
    after_in_child=_for_each(Exporter._reset_in_child),
)
