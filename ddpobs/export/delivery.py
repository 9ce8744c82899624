"""Delivery of encoded batches until they are acknowledged: a few in memory, the rest on disk, and a thread of its own.

A batch in memory has a copy in the spool, which is removed with its acknowledgement: if the process is killed, the next
process or `ddpobs push` finds the copy.

No other thread waits for it: a hanging request or a name that does not resolve delays only the delivery.

A request ends at `timeout_s` however slowly bytes come, but no timeout ends a DNS look-up. On one thread with the
exporter, pulses and straggler statistics stopped while a collector did not answer, which is when they are needed. At
most 16 batches wait in memory besides the batch in flight. Spooled batches go out ten a second, so that a backlog costs
training nothing.

Ranks complete their batches at the same moment. Each process draws its own phase of the flush and sends there, so that
batches arrive evenly: of a thousand at once, each would be acknowledged only when the last is written.

At exit, batches are sent until four fifths of `exit_s` have passed. The rest goes to the spool, with the batch in
flight: if it did arrive, it becomes a repeated batch.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable

from ddpobs.config import TelemetryConfig
from ddpobs.export.backlog import Backlog, Copies
from ddpobs.export.http_sender import Outcome, Response, Sender, pause_s
from ddpobs.export.once import Once
from ddpobs.export.spool import Encoded, Spool, folder_of

_log = logging.getLogger("ddpobs")
WAITING_BATCHES = 16
"""Batches in memory, besides the one in flight, while the collector is not reachable; further ones go to the spool."""
_SPOOLED_PAUSE_S = 0.1
"""Seconds between batches of a backlog, so that sending it costs training almost nothing."""
MAX_REST_S = 2.0
"""Longest time for which the telemetry threads wait for the end of a rest: pulses go on in a longer one."""
FORBIDDEN_PAUSE_S = 60.0
"""Seconds after a rejected token: collectors count wrong tokens by address, which many ranks may share."""
_FINAL = (Outcome.STORED, Outcome.REPEATED, Outcome.REFUSED)


class Delivery:
    """Delivery of one source's batches to the collector.

    Args:
        config: The collector's address, and limits.
        count_lost: Called with the number of records that were lost: the spool was full, or the collector refused them.
        warn: Logs warnings.
        awake: While it is not set, telemetry rests: nothing is sent, for at most `MAX_REST_S`. None if it never rests.
    """

    def __init__(
        self,
        config: TelemetryConfig,
        count_lost: Callable[[int], None],
        warn: Once,
        awake: threading.Event | None = None,
    ) -> None:
        self._awake = awake
        self._config, self._count_lost, self._warn = config, count_lost, warn
        spool = Spool(folder_of(config.spool), int(config.spool_mb * 1e6), private=not config.spool)
        self._folder = spool.folder
        self._copies, self._backlog = Copies(spool), Backlog(spool, count_lost, warn)
        self._condition = threading.Condition()
        """Guards the fields below; locked for moments only, never during a request or a disk access."""
        self._queue: deque[Encoded] = deque()
        self._in_flight: Encoded | None = None
        self._deadline: float | None = None
        self._abandoned = False
        self._quiet_until = 0.0
        self._latest_put, self._spread_until = 0.0, 0.0
        self._attempts = 0
        self._jitter = random.Random()
        self._phase = self._jitter.random()
        """Share of a flush after which this process sends. Ranks cut their batches together, but send them apart."""
        self._thread: threading.Thread | None = None
        self.first_response: Response | None = None
        """The collector's response to the first batch; None until it arrives."""

    @property
    def idle(self) -> bool:
        """Whether every batch in memory was sent."""
        return not self._queue and self._in_flight is None

    @property
    def queued_sizes(self) -> list[int]:
        """Sizes of the batches in memory, in bytes."""
        with self._condition:
            return [len(batch.body) for batch in (*self._queue, self._in_flight) if batch is not None]

    def start(self) -> None:
        """Start the thread, unless the certificates that its sender needs cannot be read.

        The sender is created here, not on the thread. A child forked during an import, or while OpenSSL reads
        certificates, would wait forever for a lock that the thread holds.
        """
        try:
            sender = Sender(self._config)
        except OSError as error:
            self._warn("sender", "batches are kept, and none is sent: %s", error)
            return
        thread = threading.Thread(target=self._run, args=(sender,), name="ddpobs-delivery", daemon=True)
        thread.start()
        self._thread = thread

    def put(self, batch: Encoded) -> None:
        """Accept a batch. Never waits for the network.

        Waits for the disk if memory holds enough batches, or if a request is under way: it may hang, and the delivery's
        thread with it, which otherwise copies the batch.
        """
        now = time.monotonic()
        with self._condition:
            self._backlog.source = batch.source
            if not self._queue:
                self._spread_until = now + self.spread_s(now - self._latest_put)
            self._latest_put = now
            self._queue.append(batch)
            most = 0 if self._abandoned else WAITING_BATCHES
            surplus = [self._queue.popleft() for _ in range(len(self._queue) - most)]
            busy = self._in_flight is not None
            self._condition.notify()
        while busy and self._copy_next():
            pass
        for surplus_batch in surplus:
            self._move_to_disk(surplus_batch)

    def adopt(self, sources: set[str]) -> None:
        """Send the spooled batches of dead processes too."""
        with self._condition:
            self._backlog.adopted |= sources
            self._backlog.on_disk = self._backlog.on_disk or bool(sources)
            self._condition.notify()

    def hurry(self) -> None:
        """Send the batches in memory now, without the spread over a flush; a pause after an error still holds."""
        with self._condition:
            self._spread_until = time.monotonic()
            self._condition.notify()

    def spread_s(self, since_s: float) -> float:
        """Return the wait of a batch that arrived `since_s` seconds after the previous one."""
        return self._phase * min(since_s, self._config.flush_s)

    def close(self, deadline: float) -> bool:
        """Send remaining batches until `deadline` (`time.monotonic`), then write the others to disk.

        The batch in flight is written too. Later batches go to disk at once.

        Returns:
            Whether any batch is on disk at the end.
        """
        with self._condition:
            self._deadline = deadline
            self._condition.notify()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        with self._condition:
            self._abandoned = True
            unsent = [b for b in (self._in_flight, *self._queue) if b is not None and b.spooled is None]
            self._queue.clear()
        for batch in unsent:
            self._move_to_disk(batch)
        spooled = bool(self._backlog)
        if spooled:
            command = f"ddpobs push {self._folder} --collector {self._config.collector}"
            _log.warning("ddpobs: unsent batches are in %s: send them with `%s`", self._folder, command)
        return spooled

    def _run(self, sender: Sender) -> None:
        while self._ready():
            if self._awake is not None:
                self._awake.wait(MAX_REST_S)
            try:
                if not self._copy_next() and (batch := self._next()) is not None:
                    self._settle(batch, self._send(sender, batch))
            except Exception:  # For example, of the disk: the next batch may succeed.
                self._warn("delivery", "telemetry failed (delivery); training goes on", trace=True)
                with self._condition:
                    self._in_flight = None
                    self._backlog.failed(lambda failures: pause_s(failures, _SPOOLED_PAUSE_S, self._jitter))
        sender.close()

    def _ready(self) -> bool:
        """Wait until a batch may be sent or copied (True), or until no further one will be sent (False)."""
        with self._condition:
            while True:
                if self._first_uncopied() is not None:
                    return True
                now, due = time.monotonic(), self._due()
                if self._deadline is not None and not (self._attempts < 2 and max(now, due) < self._deadline - 0.05):
                    return False
                if now >= due:
                    return True
                self._condition.wait(None if due == math.inf else due - now)

    def _due(self) -> float:
        """Return the time at which the next batch is sent; infinity if there is none."""
        if self._queue:
            return self._quiet_until if self._deadline is not None else max(self._quiet_until, self._spread_until)
        return max(self._quiet_until, self._backlog.due)

    def _first_uncopied(self) -> Encoded | None:
        """Return a batch without a copy, for a caller that has the lock; the exit needs none."""
        return None if self._deadline is not None else self._copies.first_missing(self._queue)

    def _copy_next(self) -> bool:
        """Copy a batch into the spool, so that a kill of the process does not lose it; returns False if all were."""
        with self._copies.lock:
            with self._condition:
                batch = self._first_uncopied()
                if batch is None:
                    return False
                self._copies.seq = batch.seq
            self._copies.add(batch)
        return True

    def _next(self) -> Encoded | None:
        with self._condition:
            if self._first_uncopied() is not None:
                return None
            if self._queue:
                self._in_flight = self._queue.popleft()
                return self._in_flight
        self._in_flight = self._backlog.first()
        return self._in_flight

    def _send(self, sender: Sender, batch: Encoded) -> Response:
        within_s = self._config.timeout_s
        if self._deadline is not None:
            within_s = min(within_s, self._deadline - time.monotonic())
        try:
            return sender.send(batch.run, batch.source, batch.seq, batch.body, within_s)
        except Exception as error:
            self._warn("send", "telemetry failed (sending); training goes on", trace=True)
            return Response(Outcome.RETRY, repr(error))

    def _settle(self, batch: Encoded, response: Response) -> None:
        """Act on a response, unless the batch was abandoned in the meantime."""
        final = response.outcome in _FINAL
        with self._condition:
            if self._abandoned:
                return
            self._in_flight = None
            self.first_response = self.first_response or response
            if not final:
                least_s = FORBIDDEN_PAUSE_S if response.outcome is Outcome.FORBIDDEN else response.retry_after_s
                self._quiet_until = time.monotonic() + pause_s(self._attempts, least_s, self._jitter)
                self._attempts += 1
                if batch.spooled is None:
                    self._queue.appendleft(batch)
            else:
                self._attempts = 0
                if batch.spooled is not None and self._deadline is None:
                    self._quiet_until = time.monotonic() + _SPOOLED_PAUSE_S
        if final:
            self._backlog.remove(batch, None if batch.spooled is not None else self._copies.pop(batch.seq))
        if response.outcome is Outcome.REFUSED and batch.source == self._backlog.source:
            self._count_lost(batch.records)
            self._warn("refused", "the collector refused a batch, which is lost: %s", response.detail)
        elif response.outcome is Outcome.FORBIDDEN:
            self._warn("forbidden", "the collector rejects the token (DDPOBS_TOKEN): %s", response.detail)
        elif response.outcome is Outcome.RETRY:
            collector = self._config.collector
            self._warn("away", "the collector %s accepts no batches; they are kept: %s", collector, response.detail)

    def _move_to_disk(self, batch: Encoded) -> None:
        """Keep a batch on disk alone: its copy, if there is one."""
        if self._copies.keep(batch.seq):
            self._backlog.on_disk = True
        else:
            self._backlog.put(batch)
