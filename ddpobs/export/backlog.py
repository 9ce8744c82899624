"""Batches of a delivery that are on disk: copies of those in memory, and those that wait to be sent from there."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path

from ddpobs.export.once import Once
from ddpobs.export.spool import Encoded, Spool, Spooled

_MAX_LISTED = 256
"""Maximum number of spooled batches that one listing of the spool takes."""


class Copies:
    """Copies in the spool of the batches in memory, so that a kill of the process does not lose them.

    Args:
        spool: Holds the copies.

    Attributes:
        lock: Locked while a batch is copied, so that it is not spooled twice.
        seq: Highest sequence number of which a copy was attempted.
    """

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._by_seq: dict[int, Spooled] = {}
        self.lock = threading.Lock()
        self.seq = -1

    def first_missing(self, queue: deque[Encoded]) -> Encoded | None:
        """Return the first batch of which no copy was attempted; the caller guards the queue."""
        if not queue or queue[-1].seq <= self.seq:
            return None
        return next((batch for batch in queue if batch.seq > self.seq), None)

    def add(self, batch: Encoded) -> None:
        """Copy a batch, if there is room on the disk; the caller has the lock."""
        with suppress(OSError):
            copy = self._spool.put_if_room(batch, time.time_ns())
            if copy is not None:
                self._spool.copies.add(copy.path)
                self._by_seq[batch.seq] = copy

    def pop(self, seq: int) -> Spooled | None:
        """Forget the copy of a batch, and return it."""
        return self._by_seq.pop(seq, None)

    def keep(self, seq: int) -> bool:
        """Leave the copy as the only one of its batch; returns False if there is none."""
        with self.lock:
            copy = self.pop(seq)
        if copy is not None:
            self._spool.copies.discard(copy.path)
        return copy is not None


class Backlog:
    """Batches that are sent from the spool.

    Args:
        spool: Holds the batches.
        count_lost: Called with the number of records that were lost.
        warn: Logs warnings.

    Attributes:
        source: Of this process's batches.
        adopted: Sources of dead processes, with batches in the spool.
        on_disk: The spool may hold batches that were not listed.
    """

    def __init__(self, spool: Spool, count_lost: Callable[[int], None], warn: Once) -> None:
        self._spool, self._count_lost, self._warn = spool, count_lost, warn
        self._listed: deque[Spooled] = deque()
        self._ignored: set[Path] = set()
        """Files that were sent or abandoned, and could not be removed."""
        self._failures, self._quiet_until = 0, 0.0
        self.source = ""
        self.adopted: set[str] = set()
        self.on_disk = False

    @property
    def due(self) -> float:
        """The `time.monotonic` from which a batch may be sent; infinity if there is none."""
        return self._quiet_until if self else math.inf

    def __bool__(self) -> bool:
        """Whether a batch may be on disk."""
        return self.on_disk or bool(self._listed)

    def failed(self, pause_s: Callable[[int], float]) -> None:
        """Pause after an error, for example of the disk; `pause_s` gets the number of errors in a row."""
        self.on_disk, self._failures = True, self._failures + 1
        self._quiet_until = time.monotonic() + pause_s(self._failures)

    def first(self) -> Encoded | None:
        """Read the first batch; None without one.

        Raises:
            OSError: The folder cannot be listed.
        """
        if not self._listed:
            self._list()
        while self._listed:
            first = self._listed[0]
            try:
                return Encoded(first.run, first.source, first.seq, first.records, first.body(), first)
            except FileNotFoundError:
                self._listed.popleft()  # `ddpobs push` has sent it, or it was dropped for a newer one.
            except OSError as error:
                self._listed.popleft().set_aside()
                self._ignored.add(first.path)  # The rename may have failed.
                self._count_lost(first.records)
                self._warn("unreadable", "%s cannot be read and is set aside: %s", first.path, error)
        return None

    def _list(self) -> None:
        self.on_disk = False
        sources = {self.source, *self.adopted}
        spooled = (batch for batch in self._spool.batches(sources) if batch.path not in self._ignored)
        self._listed.extend(islice(spooled, _MAX_LISTED))
        self.on_disk, self._failures = self.on_disk or bool(self._listed), 0

    def remove(self, batch: Encoded, copy: Spooled | None) -> None:
        """Remove a batch that was sent: the first one of the backlog, or one from memory with its copy."""
        if batch.spooled is not None:
            self._listed.popleft()
        file = batch.spooled or copy
        if file is not None:
            try:
                self._spool.remove(file, len(batch.body))
            except OSError:
                self._ignored.add(file.path)

    def put(self, batch: Encoded) -> None:
        """Move a batch from memory to disk."""

        def dropped(run: str, records: int) -> None:
            self._warn(
                "full", "the spool %s is full (DDPOBS_SPOOL_MB); its oldest batches are dropped", self._spool.folder
            )
            if run == batch.run:
                self._count_lost(records)
            else:  # Counting them would add them to this run's losses.
                self._warn(f"full, {run}", "the dropped batches include some of run %s, which are not counted", run)

        try:
            self._spool.put(batch, time.time_ns(), dropped)
        except OSError as error:
            self._count_lost(batch.records)
            self._warn("spool", "the spool %s cannot be written: %s", self._spool.folder, error)
            return
        self.on_disk = True
