"""From finished steps to acknowledged batches: one bounded queue, one daemon thread.

`offer` never blocks. The thread turns what was offered into batches, sends them, retries with back-off, and keeps on
disk what the collector does not take. Whatever is lost is counted, and the count travels with every batch.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import zstandard

from ddpobs import wire
from ddpobs.clocks import anchor
from ddpobs.config import TelemetryConfig
from ddpobs.sender import Outcome, Sender, pause_s
from ddpobs.spool import Spool, default_folder

_log = logging.getLogger("ddpobs")
_TICK_S = 0.05
_WAITING_BATCHES = 16
"""Encoded batches held in memory while the collector is away; more go to the spool."""
_REST_S = 0.25
"""How long a fork waits for the thread to come to rest."""
_RECORDS_A_BURST = 64
"""Steps turned into columns before the interpreter is offered to training again."""


@dataclass(frozen=True)
class Identity:
    """Whose batches these are."""

    run: str
    attempt: str
    source: str
    rank: int
    world_size: int


@dataclass(frozen=True)
class Envelope(Identity):
    """What a batch carries besides its records."""

    seq: int
    emitted: int
    dropped: int
    anchor: wire.Anchor


@dataclass(frozen=True)
class _Encoded:
    seq: int
    records: int
    body: bytes


class Exporter:
    """The way out of a training process.

    Args:
        config: Addresses, limits and times.
        encoder: Turns offered records into a batch; runs on the telemetry thread.

    Attributes:
        emitted: Records offered so far.
        dropped: Records lost so far: the queue or the spool was full, or the collector refused them.
    """

    def __init__(self, config: TelemetryConfig, encoder: Callable[[Sequence[object], Envelope], wire.Batch]) -> None:
        self._config, self._encoder = config, encoder
        self._queue: deque[tuple[object, int]] = deque()
        self._weight = 0
        self._oldest = 0.0
        self._identity: Identity | None = None
        self._periodic: list[list[object]] = []
        self._waiting: deque[_Encoded] = deque()
        self._spool = Spool(config.spool or default_folder(), int(config.spool_mb * 1e6))
        self._sender: Sender | None = None
        self._seq = 0
        self._attempts = 0
        self._quiet_until = 0.0
        self._spooled = False
        self._told: set[str] = set()
        self._jitter = random.Random()
        self._wake = threading.Event()
        self._stopping = False
        self._abandoned = False
        self._deadline = 0.0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._working = threading.RLock()
        """Held by the thread but while it waits: whoever else holds it finds the thread outside of any library."""
        self._rounds, self._unrested = 0, -1
        self._counting = threading.RLock()
        """Held for a few additions, microseconds. A collected object may offer in the middle of them, too."""
        self.emitted = 0
        self.dropped = 0
        _exporters.add(self)

    def start(self) -> None:
        """Start the thread.

        What it needs is made and imported before: a fork may come at any time, and a child that inherits an import half
        done, or a lock of OpenSSL's that was held, waits for ever once it needs them too.
        """
        self._try("sender", self._connect)
        self._thread = threading.Thread(target=self._run, name="ddpobs-telemetry", daemon=True)
        self._thread.start()

    def offer(self, record: object, weight: int = 1) -> bool:
        """Take a record that counts as `weight` records; False where the queue is full and it was dropped."""
        if self._closed:
            return False
        with self._counting:
            self.emitted += weight
            if len(self._queue) >= self._config.queue_records:
                self.dropped += weight
                return False
            if not self._queue:
                self._oldest = time.monotonic()
            self._queue.append((record, weight))
            self._weight += weight
        if self._weight >= self._config.batch_spans:
            self._wake.set()
        return True

    def every(self, seconds: float, call: Callable[[], None]) -> None:
        """Have the telemetry thread call this about every so many seconds; its errors are told once, and no more."""
        self._periodic.append([seconds, call, time.monotonic()])

    def identify(self, identity: Identity) -> None:
        """Say whose records these are; until then they wait in the queue."""
        self._identity = identity

    def close(self, timeout_s: float | None = None) -> None:
        """Flush for at most `timeout_s` (default `config.exit_s`); what is left goes to the spool. Never raises."""
        if self._closed:
            return
        self._closed = True
        limit_s = self._config.exit_s if timeout_s is None else timeout_s
        self._deadline = time.monotonic() + 0.8 * limit_s
        self._stopping = True
        self._wake.set()
        if self._thread is None or os.getpid() != self._pid:
            return
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread.is_alive():
            # It hangs in a request that the collector does not answer: keep what it holds, its request included.
            self._abandoned = True
            # A thread that comes back from C++, a store's, while the interpreter ends is unwound by it, and the process
            # aborts: "terminate called without an active exception". From here on it calls nothing any more.
            rests = self._working.acquire(timeout=0.2 * limit_s)
            self._try("batch", lambda: self._cut_batches(everything=True))
            self._try("exit", self._keep_all)
            if rests:
                self._working.release()

    def _connect(self) -> None:
        self._sender = Sender(self._config)

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(_TICK_S)
            self._wake.clear()
            self._rounds += 1
            self._guard("periodic", self._tick)
            self._guard("batch", self._cut_batches)
            self._guard("send", self._send_some)
        self._guard("exit", self._finish)
        if self._sender is not None:
            self._sender.close()

    def _guard(self, what: str, call: Callable[[], object]) -> None:
        """Run one part of the thread's round, unless it was abandoned."""
        with self._working:
            if not self._abandoned:
                self._try(what, call)

    def _try(self, what: str, call: Callable[[], object]) -> None:
        """An error in this is told once and goes no further."""
        try:
            call()
        except Exception:
            self._tell_once(what, "telemetry failed (%s); training goes on", what, trace=True)

    def _tick(self) -> None:
        now = time.monotonic()
        for entry in self._periodic:
            seconds, call, due = entry
            if now >= due:  # type: ignore[operator]
                entry[2] = now + seconds  # type: ignore[operator]
                self._guard(f"periodic {call}", call)  # type: ignore[arg-type]

    def _cut_batches(self, everything: bool = False) -> None:
        while self._identity is not None and self._queue and (everything or self._due()):
            self._cut_batch(self._identity)

    def _due(self) -> bool:
        return self._weight >= self._config.batch_spans or time.monotonic() - self._oldest >= self._config.flush_s

    def _cut_batch(self, identity: Identity) -> None:
        taken: list[object] = []
        weight = 0
        while self._queue and weight < self._config.batch_spans and len(taken) < _RECORDS_A_BURST * 16:
            with self._counting:
                record, records = self._queue.popleft()
                self._weight -= records
            taken.append(record)
            weight += records
        self._oldest = time.monotonic()
        envelope = Envelope(
            **vars(identity), seq=self._seq, emitted=self.emitted, dropped=self.dropped, anchor=anchor()
        )
        self._seq += 1
        try:
            body = zstandard.compress(wire.encode(self._encoder(taken, envelope)), 1)
        except Exception:
            self._lost(weight)
            raise
        self._waiting.append(_Encoded(envelope.seq, weight, body))
        while len(self._waiting) > _WAITING_BATCHES:
            self._keep(self._waiting.popleft())

    def _send_some(self) -> None:
        if time.monotonic() < self._quiet_until or self._identity is None:
            return
        while self._waiting and not self._stopping and self._send(self._waiting[0], None):
            self._waiting.popleft()
        if not self._waiting and self._spooled:
            self._send_spooled(self._identity)

    def _send_spooled(self, identity: Identity) -> None:
        """One batch of ours from the spool, if any is left; the next one comes with the next round."""
        for kept in self._spool.batches(identity.source):
            try:
                body = kept.body()
            except OSError as error:
                kept.set_aside()
                self._lost(kept.records)
                self._tell_once("unreadable", "%s cannot be read and is set aside: %s", kept.path, error)
                continue
            if self._send(_Encoded(kept.seq, kept.records, body), None):
                kept.path.unlink(missing_ok=True)
            return
        self._spooled = False

    def _send(self, batch: _Encoded, within_s: float | None) -> bool:
        """Whether the batch is off our hands: stored, refused for good, or kept on disk."""
        identity, sender = self._identity, self._sender
        if identity is None or sender is None:
            return False
        answer = sender.send(identity.run, identity.source, batch.seq, batch.body, within_s)
        if answer.outcome in (Outcome.STORED, Outcome.REPEATED):
            self._attempts = 0
            return True
        if answer.outcome is Outcome.REFUSED:
            self._lost(batch.records)
            self._tell_once("refused", "the collector refuses a batch, which is lost: %s", answer.detail)
            return True
        if answer.outcome is Outcome.FORBIDDEN:
            self._tell_once("forbidden", "the collector wants another token (DDPOBS_TOKEN): %s", answer.detail)
        else:
            self._tell_once("away", "the collector does not take batches, they are kept: %s", answer.detail)
        self._quiet_until = time.monotonic() + pause_s(self._attempts, answer.retry_after_s, self._jitter)
        self._attempts += 1
        return False

    def _keep(self, batch: _Encoded) -> None:
        if self._identity is None:
            return
        try:
            lost = self._spool.put(
                self._identity.run,
                self._identity.source,
                batch.seq,
                records=batch.records,
                body=batch.body,
                at_ns=time.time_ns(),
            )
            self._lost(lost)
            self._spooled = True
        except OSError as error:
            self._lost(batch.records)
            self._tell_once("spool", "the spool %s takes nothing: %s", self._spool.folder, error)

    def _finish(self) -> None:
        """The last flush: send while there is time, keep the rest."""
        # A rank that ends at once may be done before rank 0 said whose records these are.
        while self._identity is None and time.monotonic() < self._deadline - self._config.exit_s / 4:
            self._tick()
            time.sleep(_TICK_S / 4)
        for _, call, _ in self._periodic:
            self._guard(f"periodic {call}", call)  # type: ignore[arg-type]
        self._guard("batch", lambda: self._cut_batches(everything=True))
        if self._identity is None:
            self._lost(self._weight)
        while self._waiting and not self._abandoned:
            left_s = self._deadline - time.monotonic()
            if left_s <= 0.05 or self._attempts > 1 or not self._send(self._waiting[0], left_s):
                break
            self._waiting.popleft()
        if not self._abandoned:
            self._keep_all()

    def _keep_all(self) -> None:
        kept = len(self._waiting)
        while self._waiting:
            self._keep(self._waiting.popleft())
        if kept:
            _log.warning("ddpobs: %d batches are kept in %s: send them with `ddpobs push`", kept, self._spool.folder)

    def _lost(self, records: int) -> None:
        with self._counting:
            self.dropped += records

    def _tell_once(self, key: str, message: str, *facts: object, trace: bool = False) -> None:
        if key not in self._told:
            self._told.add(key)
            _log.warning("ddpobs: " + message, *facts, exc_info=trace)

    def _rest(self) -> None:
        """Before a fork: have the thread rest until after it. A request without an answer is waited for once only."""
        if not self._working.acquire(timeout=0 if self._unrested == self._rounds else _REST_S):
            self._unrested = self._rounds

    def _go_on(self) -> None:
        """After a fork, in the parent."""
        with suppress(RuntimeError):  # It did not come to rest.
            self._working.release()

    def _forget(self) -> None:
        """In a forked child (a loader worker): no thread came along, and nothing may be sent under the parent's key."""
        self._closed, self._thread = True, None
        self._queue.clear()
        self._counting, self._working = threading.RLock(), threading.RLock()


_exporters: weakref.WeakSet[Exporter] = weakref.WeakSet()


def _everyone(does: Callable[[Exporter], None]) -> Callable[[], None]:
    def tell() -> None:
        for exporter in list(_exporters):
            does(exporter)

    return tell


os.register_at_fork(
    before=_everyone(Exporter._rest),
    after_in_parent=_everyone(Exporter._go_on),
    after_in_child=_everyone(Exporter._forget),
)
