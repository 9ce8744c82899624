"""Export of finished steps as encoded batches: one bounded queue, one daemon thread.

`offer` never blocks. The thread builds batches from the queue and passes them to the delivery, which has its own thread
for operations that may hang. Lost records are counted, and every batch carries the count.

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
from collections.abc import Callable, Sequence
from contextlib import suppress

from ddpobs import wire
from ddpobs.config import TelemetryConfig
from ddpobs.export.batch_cutter import BatchCutter
from ddpobs.export.delivery import MAX_REST_S, Delivery
from ddpobs.export.http_sender import Response
from ddpobs.export.identity import Envelope, Identity
from ddpobs.export.once import Once
from ddpobs.export.record_queue import RecordQueue
from ddpobs.export.schedule import SLACK_S, Schedule

_FORK_PAUSE_S = 0.25
"""Longest time that a fork waits for the thread to pause."""


class Exporter:
    """Queue and thread that export the records of a training process.

    Args:
        config: Addresses, limits and times.
        encoder: Builds a batch from offered records; runs on the telemetry thread.
        ready: Whether the encoder can process a record without waiting for a device. Later records wait behind a record
            that is not ready.
        settle: Called at the end if no identity has arrived; may set one.
        awake: As for `Delivery`: in a rest no batch is built either, and no periodic call is made.

    Attributes:
        all_delivered: Whether the exporter is closed and no batch of this process waits on disk.
    """

    def __init__(
        self,
        config: TelemetryConfig,
        encoder: Callable[[Sequence[object], Envelope], wire.Batch],
        ready: Callable[[object], bool] = lambda _: True,
        settle: Callable[[], object] = lambda: None,
        awake: threading.Event | None = None,
    ) -> None:
        self._config = config
        self._warn, self._settle = Once(), settle
        self._queue = RecordQueue(config, ready)
        self._cutter = BatchCutter(self._queue, encoder, self._warn)
        self._schedule = Schedule(config.flush_s)
        self._awake = awake
        self._delivery = Delivery(config, self.count_lost, self._warn, awake)
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
        _exporters.add(self)

    @property
    def emitted(self) -> int:
        """Records offered so far."""
        return self._queue.emitted

    @property
    def dropped(self) -> int:
        """Records lost so far: the queue or the spool was full, or the collector refused them."""
        return self._queue.dropped

    @property
    def queued_sizes(self) -> list[int]:
        """Sizes of the batches in memory that wait to be sent, in bytes."""
        return self._delivery.queued_sizes

    @property
    def first_response(self) -> Response | None:
        """The collector's response to the first batch; None until it arrives."""
        return self._delivery.first_response

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
        if not self._queue.offer(record, weight, slots):
            return False
        if self._queue.fills_a_batch:
            self._wake.set()
        return True

    def offer_latest(self, record: object, urgent: bool = False) -> None:
        """Send a record with the next batch. It replaces the previous such record, and is not counted.

        Args:
            record: Input of the encoder.
            urgent: Cut a batch in this round of the thread, and send it at once. A periodic call may ask for it.
        """
        self._cutter.offer_latest(record, urgent)

    def call_every(self, seconds: float, call: Callable[[], object]) -> None:
        """Call a function periodically on the telemetry thread, at the same moments as other ranks.

        Args:
            seconds: The period; the first call is immediate.
            call: Called until it returns `DONE`. Its errors are logged once.
        """
        self._schedule.call_every(seconds, call)

    def count_lost(self, records: int) -> None:
        """Count offered records that will not arrive."""
        self._queue.count_lost(records)

    def identify(self, identity: Identity) -> None:
        """Set the identity of the batches; until then, records wait in the queue."""
        self._cutter.identity = identity

    def adopt(self, sources: set[str]) -> None:
        """Send the spooled batches of dead processes too."""
        self._delivery.adopt(sources)

    def flush_soon(self) -> None:
        """Cut and send a batch now, on the threads."""
        self._cutter.is_urgent = True
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
        if self._awake is not None:
            self._awake.set()
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
            self._wake.wait(self._schedule.pause_s())
            if self._awake is not None:
                self._awake.wait(MAX_REST_S)
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

    def _tick(self) -> None:
        self._schedule.run_due(lambda call: self._try(f"periodic {call}", call))

    def _cut_due(self) -> None:
        urgent = self._cutter.is_urgent
        flushes = self._schedule.take_flush() or urgent
        while self._cutter.is_due(flushes, self._delivery.idle):
            self._cut_batch()
        self._cutter.is_urgent = False
        if urgent:
            self._delivery.hurry()

    def _cut_everything(self) -> None:
        while self._cutter.has_any:
            self._cut_batch()

    def _report_loss(self) -> None:
        """Spool one more batch that reports the losses since the last one; it may itself displace another batch."""
        while self._cutter.has_losses:
            self._cut_batch()

    def _cut_batch(self) -> None:
        batch = self._cutter.cut()
        if batch is not None:
            self._delivery.put(batch)

    def _finish(self) -> None:
        """Cut the last batches, once the identity is set and the device has reached the end of the last step."""
        # A rank that ends at once may have finished before rank 0 shared the identity.
        while self._must_wait() and time.monotonic() < self._deadline:
            self._guard("periodic", self._tick)
            time.sleep(SLACK_S / 2)
        for call in self._schedule.calls:
            self._guard(f"periodic {call}", call)
        if self._cutter.identity is None:
            self._guard("identity", self._settle)
        self._guard("batch", self._cut_everything)
        lost = self._queue.weight
        self.count_lost(lost)
        if self._cutter.identity is None and lost:
            self._warn("identity", "lost %d records: the run's id had not arrived when the process ended", lost)

    def _must_wait(self) -> bool:
        return self._cutter.identity is None or not self._queue.all_ready

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
        """Reset in a forked child, as a loader worker: it has no thread, and must not send under the parent's key."""
        self._closed, self._thread = True, None
        self._queue.reset_in_child()
        self._work_lock = threading.RLock()


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
