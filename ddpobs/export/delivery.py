"""From encoded batches to acknowledged ones: a few in memory, the rest on disk, and a thread that may hang.

Nobody waits for that thread: a request that hangs, or a name that does not resolve, holds up nothing but the delivery.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from ddpobs.config import TelemetryConfig
from ddpobs.export.http_sender import Answer, Outcome, Sender, pause_s
from ddpobs.export.spool import Encoded, Spool, Spooled, default_folder

_log = logging.getLogger("ddpobs")
WAITING_BATCHES = 16
"""Batches held in memory, besides the one under way, while the collector is away; more go to the spool."""
_SPOOLED_AT_ONCE = 256
_SPOOLED_PAUSE_S = 0.1
"""Between batches of a backlog, so that sending it costs training next to nothing."""
FORBIDDEN_PAUSE_S = 60.0
"""After a token was not taken: collectors count wrong ones by address, where many ranks may be."""
_OFF_OUR_HANDS = (Outcome.STORED, Outcome.REPEATED, Outcome.REFUSED)


class Once:
    """Warnings, each said once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, key: str, message: str, *facts: object, trace: bool = False) -> None:
        """Log it unless something with this key was said; `trace` adds the exception at hand."""
        if key not in self._said:
            self._said.add(key)
            _log.warning("ddpobs: " + message, *facts, exc_info=trace)


class Delivery:
    """Batches of one source on their way to the collector.

    Args:
        config: The collector's address, and limits.
        lost: Told how many records were lost: the spool was full, or the collector refused them.
        warn: Where warnings go.
    """

    def __init__(self, config: TelemetryConfig, lost: Callable[[int], None], warn: Once) -> None:
        self._config, self._lost, self._warn = config, lost, warn
        folder = Path(config.spool or default_folder())
        self._spool = Spool(folder, int(config.spool_mb * 1e6), private=not config.spool)
        self._changed = threading.Condition()
        """Guards the fields below; held for moments only, never over a request or the disk."""
        self._waiting: deque[Encoded] = deque()
        self._under_way: Encoded | None = None
        self._deadline: float | None = None
        self._abandoned = False
        self._quiet_until = 0.0
        self._put_last, self._spread_until = 0.0, 0.0
        self._attempts = 0
        self._on_disk = False
        self._disk_failed, self._disk_quiet_until = 0, 0.0
        self._backlog: deque[Spooled] = deque()
        self._done_with: set[Path] = set()
        """Files that were sent or given up, and could not be removed."""
        self._source = ""
        self._jitter = random.Random()
        self._phase = self._jitter.random()
        """The part of a flush after which this process sends: ranks cut theirs together, and would send them so."""
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether every batch in memory was sent."""
        return not self._waiting and self._under_way is None

    @property
    def held(self) -> list[int]:
        """Sizes in bytes of the batches in memory."""
        with self._changed:
            return [len(batch.body) for batch in (*self._waiting, self._under_way) if batch is not None]

    def start(self) -> None:
        """Start the thread.

        What it needs is made here and not there: a child forked during an import, or while OpenSSL reads certificates,
        would wait for ever for what it finds half done.
        """
        sender = Sender(self._config)
        self._thread = threading.Thread(target=self._run, args=(sender,), name="ddpobs-delivery", daemon=True)
        self._thread.start()

    def put(self, batch: Encoded) -> None:
        """Take a batch. Waits for no network; for the disk where memory holds enough."""
        now = time.monotonic()
        with self._changed:
            self._source = batch.source
            if not self._waiting:
                self._spread_until = now + self.spread_s(now - self._put_last)
            self._put_last = now
            self._waiting.append(batch)
            most = 0 if self._abandoned else WAITING_BATCHES
            surplus = [self._waiting.popleft() for _ in range(len(self._waiting) - most)]
            self._changed.notify()
        for one in surplus:
            self._keep(one)

    def spread_s(self, since_s: float) -> float:
        """How long a batch waits that came so many seconds after the one before."""
        return self._phase * min(since_s, self._config.flush_s)

    def close(self, deadline: float) -> bool:
        """Send what is left until `deadline` (`time.monotonic`), then keep the rest on disk, the one under way too.

        Returns:
            Whether anything is on disk then. What is put from now on goes there at once.
        """
        with self._changed:
            self._deadline = deadline
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        with self._changed:
            self._abandoned = True
            left = [batch for batch in (self._under_way, *self._waiting) if batch is not None and batch.kept is None]
            self._waiting.clear()
        for batch in left:
            self._keep(batch)
        kept = self._on_disk or bool(self._backlog)
        if kept:
            folder, collector = self._spool.folder, self._config.collector
            how = f"ddpobs push {folder} --collector {collector}"
            _log.warning("ddpobs: batches are kept in %s: send all that is there with `%s`", folder, how)
        return kept

    def _run(self, sender: Sender) -> None:
        while self._ready():
            try:
                batch = self._next()
                if batch is not None:
                    self._settle(batch, self._send(sender, batch))
            except Exception:  # The disk's, say: the next batch may do.
                self._warn("delivery", "telemetry failed (delivery); training goes on", trace=True)
                with self._changed:
                    self._under_way, self._on_disk, self._disk_failed = None, True, self._disk_failed + 1
                    pause = pause_s(self._disk_failed, _SPOOLED_PAUSE_S, self._jitter)
                    self._disk_quiet_until = time.monotonic() + pause
        sender.close()

    def _ready(self) -> bool:
        """Wait until something may be sent (True) or nothing more will be (False)."""
        with self._changed:
            while True:
                now, due = time.monotonic(), self._due()
                if self._deadline is not None and not (self._attempts < 2 and max(now, due) < self._deadline - 0.05):
                    return False
                if now >= due:
                    return True
                self._changed.wait(None if due == math.inf else due - now)

    def _due(self) -> float:
        """When the next batch is to be sent: never, where there is none."""
        if self._waiting:
            return self._quiet_until if self._deadline is not None else max(self._quiet_until, self._spread_until)
        return max(self._quiet_until, self._disk_quiet_until) if self._on_disk or self._backlog else math.inf

    def _next(self) -> Encoded | None:
        with self._changed:
            if self._waiting:
                self._under_way = self._waiting.popleft()
                return self._under_way
        if not self._backlog:
            self._on_disk = False
            left = (kept for kept in self._spool.batches(self._source) if kept.path not in self._done_with)
            self._backlog.extend(islice(left, _SPOOLED_AT_ONCE))
            self._on_disk, self._disk_failed = self._on_disk or bool(self._backlog), 0
        while self._backlog:
            kept = self._backlog[0]
            try:
                self._under_way = Encoded(kept.run, kept.source, kept.seq, kept.records, kept.body(), kept)
            except FileNotFoundError:
                self._backlog.popleft()  # `ddpobs push` sent it, or it made room for a newer one.
            except OSError as error:
                self._backlog.popleft().set_aside()
                self._done_with.add(kept.path)  # It may not have been possible.
                self._lost(kept.records)
                self._warn("unreadable", "%s cannot be read and is set aside: %s", kept.path, error)
            else:
                return self._under_way
        return None

    def _send(self, sender: Sender, batch: Encoded) -> Answer:
        within_s = self._config.timeout_s
        if self._deadline is not None:
            within_s = min(within_s, self._deadline - time.monotonic())
        try:
            return sender.send(batch.run, batch.source, batch.seq, batch.body, within_s)
        except Exception as error:
            self._warn("send", "telemetry failed (sending); training goes on", trace=True)
            return Answer(Outcome.RETRY, repr(error))

    def _settle(self, batch: Encoded, answer: Answer) -> None:
        """Draw the consequences of an answer, unless the batch was given up in the meantime."""
        done = answer.outcome in _OFF_OUR_HANDS
        with self._changed:
            if self._abandoned:
                return
            self._under_way = None
            if not done:
                least_s = FORBIDDEN_PAUSE_S if answer.outcome is Outcome.FORBIDDEN else answer.retry_after_s
                self._quiet_until = time.monotonic() + pause_s(self._attempts, least_s, self._jitter)
                self._attempts += 1
                if batch.kept is None:
                    self._waiting.appendleft(batch)
            else:
                self._attempts = 0
                if batch.kept is not None and self._deadline is None:
                    self._quiet_until = time.monotonic() + _SPOOLED_PAUSE_S
        if done and batch.kept is not None:
            self._backlog.popleft()
            try:
                batch.kept.path.unlink(missing_ok=True)
            except OSError:
                self._done_with.add(batch.kept.path)
        if answer.outcome is Outcome.REFUSED:
            self._lost(batch.records)
            self._warn("refused", "the collector refuses a batch, which is lost: %s", answer.detail)
        elif answer.outcome is Outcome.FORBIDDEN:
            self._warn("forbidden", "the collector wants another token (DDPOBS_TOKEN): %s", answer.detail)
        elif answer.outcome is Outcome.RETRY:
            collector = self._config.collector
            self._warn("away", "the collector %s takes no batches, they are kept: %s", collector, answer.detail)

    def _keep(self, batch: Encoded) -> None:
        def dropped(run: str, records: int) -> None:
            self._warn("full", "the spool %s is full (DDPOBS_SPOOL_MB), its oldest batches go", self._spool.folder)
            if run == batch.run:
                self._lost(records)
            else:  # Counted here they would be told as this run's.
                self._warn(f"full, {run}", "with them batches of run %s, which are counted nowhere", run)

        try:
            self._spool.put(batch, time.time_ns(), dropped)
        except OSError as error:
            self._lost(batch.records)
            self._warn("spool", "the spool %s takes nothing: %s", self._spool.folder, error)
            return
        self._on_disk = True
