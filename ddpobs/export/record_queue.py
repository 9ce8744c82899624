"""Bounded queue of records that wait for a batch; what is lost is counted."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ddpobs.config import TelemetryConfig

_SLOTS_PER_BATCH = 1024


class _Queued(NamedTuple):
    """An element of the queue: a record, its count of wire records, and the slots that it takes."""

    record: object
    weight: int
    slots: int


class RecordQueue:
    """The queue. `offer` never blocks.

    Args:
        config: Limits of the queue and of a batch.
        ready: Whether the encoder can process a record without waiting for a device. Later records wait behind a record
            that is not ready.

    Attributes:
        emitted: Records offered so far.
        dropped: Records lost so far.
        weight: Wire records that wait.
    """

    def __init__(self, config: TelemetryConfig, ready: Callable[[object], bool]) -> None:
        self._config, self._ready = config, ready
        self._queue: deque[_Queued] = deque()
        self._slots = self.weight = 0
        self._lock = threading.RLock()
        """Locked for a few additions, microseconds; reentrant, because a finalizer may offer a record meanwhile."""
        self.emitted = self.dropped = 0

    def __len__(self) -> int:
        """Number of records that wait."""
        return len(self._queue)

    def offer(self, record: object, weight: int, slots: int) -> bool:
        """Queue a record; returns False if the queue is full and the record was dropped."""
        with self._lock:
            self.emitted += weight
            if self._slots + slots > self._config.queue_records:
                self.dropped += weight
                return False
            self._queue.append(_Queued(record, weight, slots))
            self._slots += slots
            self.weight += weight
        return True

    def count_lost(self, records: int) -> None:
        """Count offered records that will not arrive."""
        with self._lock:
            self.dropped += records

    @property
    def fills_a_batch(self) -> bool:
        """Whether the records that wait fill a batch."""
        return self.weight >= self._config.batch_spans

    @property
    def is_ready(self) -> bool:
        """Whether there is a first record, and the encoder can process it."""
        return bool(self._queue) and self._ready(self._queue[0].record)

    @property
    def all_ready(self) -> bool:
        """Whether the encoder can process every record."""
        return all(self._ready(queued.record) for queued in list(self._queue))

    def take(self) -> tuple[list[object], int]:
        """Remove the records of one batch; returns them and their weight."""
        records: list[object] = []
        weight = slots = 0
        while self.is_ready and weight < self._config.batch_spans:
            if slots + self._queue[0].slots > _SLOTS_PER_BATCH:
                break
            queued = self._queue.popleft()
            records.append(queued.record)
            weight += queued.weight
            slots += queued.slots
        with self._lock:
            self.weight -= weight
            self._slots -= slots
        return records, weight

    def reset_in_child(self) -> None:
        """Begin anew in a forked child.

        The queue is kept alive. It may hold CUDA events, and a process that deletes another process's events is ended.
        """
        self._parents, self._queue = self._queue, deque()
        self._lock = threading.RLock()
