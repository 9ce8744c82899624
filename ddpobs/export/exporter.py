"""From finished steps to encoded batches: one bounded queue, one daemon thread.

`offer` never blocks. The thread turns what was offered into batches and hands them to the delivery, which has a thread
of its own for what may hang. Whatever is lost is counted, and the count travels with every batch.

While the thread works a hook of the training's may wait for the interpreter, and with this rank every other one: what
the ranks' threads did each at its own time would be the sum of all of them in a step's time. So they work together, at
whole multiples of a period by the wall clock, as do the parallel systems of Petrini, Kerbyson and Pakin, "The case of
the missing supercomputer performance" (SC 2003).
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
from ddpobs.export.identity import Envelope, Identity
from ddpobs.export.spool import Encoded

_SLACK_S = 0.02
"""What is due so soon is done at once: the thread wakes up less often."""
_PLACES_A_BATCH = 1024
_REST_S = 0.25
"""How long a fork waits for the thread to come to rest."""
DONE = object()
"""What a periodic call returns that is not to be called again."""


@dataclass
class _Periodic:
    seconds: float
    call: Callable[[], object]
    due: float


class _Waiting(NamedTuple):
    """What is in the queue, for how many records it counts, and how many places it takes."""

    record: object
    weight: int
    places: int


class Exporter:
    """The way out of a training process.

    Args:
        config: Addresses, limits and times.
        encoder: Turns offered records into a batch; runs on the telemetry thread.
        ready: Whether the encoder can do so without waiting for a device; what comes after a record that it cannot
            waits with it.

    Attributes:
        emitted: Records offered so far.
        dropped: Records lost so far: the queue or the spool was full, or the collector refused them.
    """

    def __init__(
        self,
        config: TelemetryConfig,
        encoder: Callable[[Sequence[object], Envelope], wire.Batch],
        ready: Callable[[object], bool] = lambda _: True,
    ) -> None:
        self._config, self._encoder, self._ready = config, encoder, ready
        self._queue: deque[_Waiting] = deque()
        self._places = 0
        self._weight = 0
        self._latest: object = None
        self._flush_due = _next(config.flush_s)
        self._identity: Identity | None = None
        self._periodic: list[_Periodic] = []
        self._seq = 0
        self._warn = Once()
        self._delivery = Delivery(config, self.count_lost, self._warn)
        self._working = threading.RLock()
        """Held by the thread while it works: whoever else holds it finds the thread outside of any library."""
        self._rounds, self._unrested = 0, -1
        self._wake = threading.Event()
        self._stopping = False
        self._abandoned = False
        self._deadline = 0.0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._counting = threading.RLock()
        """Held for a few additions, microseconds. A collected object may offer in the middle of them, too."""
        self.emitted = 0
        self.dropped = 0
        self._told_dropped = 0
        _exporters.add(self)

    @property
    def queued_sizes(self) -> list[int]:
        """Sizes in bytes of the batches in memory that wait to be sent."""
        return self._delivery.held

    def start(self) -> None:
        """Start the threads."""
        self._try("start", self._delivery.start)
        self._thread = threading.Thread(target=self._run, name="ddpobs-telemetry", daemon=True)
        self._thread.start()

    def offer(self, record: object, weight: int = 1, places: int = 1) -> bool:
        """Take a record; False where the queue is full and it was dropped.

        Args:
            record: For the encoder.
            weight: How many records it counts as.
            places: How many it takes in the queue.
        """
        if self._closed and threading.current_thread() is not self._thread:
            return False
        with self._counting:
            self.emitted += weight
            if self._places + places > self._config.queue_records:
                self.dropped += weight
                return False
            self._queue.append(_Waiting(record, weight, places))
            self._places += places
            self._weight += weight
        if self._weight >= self._config.batch_spans:
            self._wake.set()
        return True

    def offer_latest(self, record: object) -> None:
        """Have a record travel with the next batch, in place of the one given here before; it is not counted."""
        self._latest = record

    def call_every(self, seconds: float, call: Callable[[], object]) -> None:
        """Have the telemetry thread call this every so many seconds, when other ranks do, until it returns `DONE`.

        The first time is at once. Its errors are told once, and no more.
        """
        self._periodic.append(_Periodic(seconds, call, time.monotonic()))

    def count_lost(self, records: int) -> None:
        """Count records that were offered and will not arrive."""
        with self._counting:
            self.dropped += records

    def identify(self, identity: Identity) -> None:
        """Say whose records these are; until then they wait in the queue."""
        self._identity = identity

    def close(self, timeout_s: float | None = None) -> None:
        """Flush for at most `timeout_s` (default `config.exit_s`); what is left goes to the spool. Never raises."""
        if self._closed:
            return
        self._closed = True
        limit_s = self._config.exit_s if timeout_s is None else timeout_s
        began = time.monotonic()
        self._deadline = began + 0.5 * limit_s
        self._stopping = True
        self._wake.set()
        if self._thread is None or os.getpid() != self._pid:
            return
        self._thread.join(0.6 * limit_s)
        if self._thread.is_alive():
            self._abandoned = True  # It hangs in a periodic call, the last that it makes.
            rests = self._working.acquire(timeout=0.1 * limit_s)
            self._try("batch", self._cut_everything)
            if rests:
                self._working.release()
        if self._try("exit", lambda: self._delivery.close(began + 0.8 * limit_s)):
            self._try("loss", self._keep_loss)
        # Coming back from C++, a store's, while the interpreter ends would abort the process.
        self._thread.join(max(0.0, began + limit_s - time.monotonic()))

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(self._pause_s())
            self._wake.clear()
            self._rounds += 1
            self._guard("periodic", self._tick)
            self._guard("batch", self._cut_due)
        self._finish()

    def _guard(self, what: str, call: Callable[[], object]) -> object:
        """Run one part of the thread's round, unless the thread was abandoned."""
        with self._working:
            return None if self._abandoned else self._try(what, call)

    def _try(self, what: str, call: Callable[[], object]) -> object:
        """An error in this is told once and goes no further."""
        try:
            return call()
        except Exception:
            self._warn(what, "telemetry failed (%s); training goes on", what, trace=True)
            return None

    def _pause_s(self) -> float:
        """Until something is due; never nothing, for a fork may be waiting for the thread to rest."""
        due = min([self._flush_due, *(periodic.due for periodic in self._periodic)])
        return max(_SLACK_S / 2, due - time.monotonic())

    def _tick(self) -> None:
        soon = time.monotonic() + _SLACK_S
        for periodic in [one for one in self._periodic if one.due <= soon]:
            periodic.due = _next(periodic.seconds)
            if self._try(f"periodic {periodic.call}", periodic.call) is DONE:
                self._periodic.remove(periodic)

    def _cut_due(self) -> None:
        flushes = self._flush_due <= time.monotonic() + _SLACK_S
        if flushes:
            self._flush_due = _next(self._config.flush_s)
        while self._identity is not None and self._due(flushes):
            self._cut_batch(self._identity)

    def _due(self, flushes: bool) -> bool:
        if self._queue and self._ready(self._queue[0].record):
            return flushes or self._weight >= self._config.batch_spans
        # News alone wait until the collector has taken the news before.
        return flushes and self._latest is not None and self._delivery.idle

    def _cut_everything(self) -> None:
        while self._identity is not None and self._queue and self._ready(self._queue[0].record):
            self._cut_batch(self._identity)
        if self._identity is not None and self._latest is not None:
            self._cut_batch(self._identity)

    def _keep_loss(self) -> None:
        """Have one more batch in the spool tell what was lost since the last one was cut; it may cost another."""
        while self._identity is not None and self.dropped != self._told_dropped:
            self._cut_batch(self._identity)

    def _cut_batch(self, identity: Identity) -> None:
        taken: list[object] = []
        weight = places = 0
        while self._queue and weight < self._config.batch_spans:
            if places + self._queue[0].places > _PLACES_A_BATCH or not self._ready(self._queue[0].record):
                break
            waiting = self._queue.popleft()
            taken.append(waiting.record)
            weight += waiting.weight
            places += waiting.places
        with self._counting:
            self._weight -= weight
            self._places -= places
        if self._latest is not None:
            taken.append(self._latest)
            self._latest = None
        envelope = Envelope(
            **vars(identity), seq=self._seq, emitted=self.emitted, dropped=self.dropped, anchor=anchor()
        )
        self._seq += 1
        self._told_dropped = envelope.dropped
        try:
            body = zstandard.compress(wire.encode(self._encoder(taken, envelope)), 1)
        except Exception:
            self.count_lost(weight)
            self._warn("batch", "telemetry failed (batch); training goes on", trace=True)
            return
        self._delivery.put(Encoded(identity.run, identity.source, envelope.seq, weight, body))

    def _finish(self) -> None:
        """The last batches, once it is known whose they are and the device got to the last step's end."""
        # A rank that ends at once may be done before rank 0 said so.
        while self._held_up() and time.monotonic() < self._deadline:
            self._guard("periodic", self._tick)
            time.sleep(_SLACK_S / 2)
        for periodic in self._periodic:
            self._guard(f"periodic {periodic.call}", periodic.call)
        self._guard("batch", self._cut_everything)
        self.count_lost(self._weight)

    def _held_up(self) -> bool:
        return self._identity is None or not all(self._ready(waiting.record) for waiting in list(self._queue))

    def _pause_for_fork(self) -> None:
        """Before a fork: have the thread rest until after it, so that the child inherits no lock that it held.

        A thread that hangs is waited for once only.
        """
        if not self._working.acquire(timeout=0 if self._unrested == self._rounds else _REST_S):
            self._unrested = self._rounds

    def _resume_after_fork(self) -> None:
        """After a fork, in the parent."""
        with suppress(RuntimeError):  # It did not come to rest.
            self._working.release()

    def _reset_in_child(self) -> None:
        """In a forked child (a loader worker): no thread came along, and nothing may be sent under the parent's key.

        What waits is kept: what it holds of a CUDA device ends a process that drops it and did not make it.
        """
        self._closed, self._thread = True, None
        self._parents, self._queue = self._queue, deque()
        self._counting, self._working = threading.RLock(), threading.RLock()


def _next(seconds: float) -> float:
    """When (`time.monotonic`) the wall clock is at a multiple of so many seconds next; not what is at hand already."""
    soon = time.time() + _SLACK_S
    return time.monotonic() + _SLACK_S + seconds - soon % seconds


_exporters: weakref.WeakSet[Exporter] = weakref.WeakSet()


def _everyone(does: Callable[[Exporter], None]) -> Callable[[], None]:
    def tell() -> None:
        for exporter in list(_exporters):
            does(exporter)

    return tell


os.register_at_fork(
    before=_everyone(Exporter._pause_for_fork),
    after_in_parent=_everyone(Exporter._resume_after_fork),
    after_in_child=_everyone(Exporter._reset_in_child),
)
