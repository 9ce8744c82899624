"""Queue of the training thread's events, and their replay into steps on another thread.

An entry is three consecutive elements of the queue, so that waiting entries occupy few container objects. Python's
garbage collector counts the containers that survive. After a quarter more than before, it visits all objects of the
process, for some tenths of a second, at a different moment on each rank.

The telemetry thread replays the entries every two seconds. If it hangs, in a forked child, or above about 340 steps a
second, the training thread replays them itself every 4,096 entries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock
from time import monotonic_ns
from typing import Any

from ddpobs.clocks import Stamp
from ddpobs.never_raises import log_failure
from ddpobs.recording.open_place import OpenPlace
from ddpobs.recording.place.place_file import Slot
from ddpobs.steps.step_tracker import StepTracker

MAX_ENTRIES = 4096
"""Entries, some hundred steps, after which the training thread replays them itself if no other thread has."""
_MAX_BACKLOG = 16 * MAX_ENTRIES
"""Entries kept while a replay hangs, in a finalizer of the user's for example; then they are discarded."""
_ENTRY_FIELDS = 3
"""Event, stamp and facts."""
_WAIT_S = 0.1


class Entries:
    """The queue.

    Args:
        tracker: Takes the events.
        place: Gets the number of the open step after a replay.
        most: Entries after which the training thread replays them itself.
        on_caught_up: Called on the replaying thread after all entries; must not raise. It and the tracker never run at
            the same time. It gets the number of the open step, whether it has begun, and time outside of it.

    Attributes:
        append: Appends an entry, given as a tuple of the tracker's method, its stamp and its arguments. The stamp is 0
            if the event has none, or its own ones among the arguments.
        replayed: Entries replayed so far.
    """

    def __init__(
        self,
        tracker: StepTracker,
        place: OpenPlace,
        most: int = MAX_ENTRIES,
        on_caught_up: Callable[[int, bool, list[tuple[int, Stamp, Stamp]]], object] = lambda *_: None,
    ) -> None:
        self._tracker, self._place, self._on_caught_up = tracker, place, on_caught_up
        self._full = _ENTRY_FIELDS * min(most, MAX_ENTRIES)
        self._replaying = Lock()
        self._failure_logged = False
        self.replayed = 0
        self._reset()

    def record(self, event: Callable[..., None], stamp: Stamp, *facts: Any) -> None:
        """Append an entry; beyond `most` entries, replay them here.

        The end of a call is appended directly instead, which saves a function call.
        """
        self.append((event, stamp, facts))
        if len(self._queue) > self._full:
            self._shed()

    @property
    def last_event_ns(self) -> int:
        """Host time of the last replayed event; 0 if the stamps are a device's."""
        stamp = self._tracker.stamp
        return stamp if type(stamp) is int else 0

    def open_step(self) -> tuple[int, int]:
        """Number of the open step, or of the next one, and the current phase as an index into `wire.PHASES`."""
        self._replay(_WAIT_S)
        return self._tracker.number, self._tracker.phase

    def catch_up(self, wait_s: float = _WAIT_S) -> None:
        """Replay the entries since the last replay; wait at most `wait_s` for another thread's replay."""
        self._replay(wait_s, lambda: self._on_caught_up(*self._tracker.tail()))

    def count_gaps_as_data(self, counts: bool) -> None:
        """Count the time before each training forward as the data phase: a batch is asked of an iterator there."""
        self._tracker.gap_is_data = counts

    def log_failure(self, call: Callable[..., object]) -> None:
        """Log the first error in a step's recording; called while it is handled."""
        if not self._failure_logged:
            self._failure_logged = True
            log_failure(call)

    def reset_after_fork(self) -> None:
        """Begin anew in a forked child: the entries, and the lock's holder, are the parent's.

        The entries are kept. A process that drops another process's CUDA events is terminated.
        """
        self._replaying = Lock()
        self._parents = self._queue
        self._reset()

    def _replay(self, wait_s: float, then: Callable[[], object] = lambda: None) -> None:
        if not self._replaying.acquire(timeout=wait_s):
            return
        queue, tracker = self._queue, self._tracker
        try:
            while queue:
                event, stamp, facts = queue.popleft(), queue.popleft(), queue.popleft()
                self.replayed += 1
                if stamp:  # 0 if the stamp could not be taken: the previous one stays.
                    tracker.stamp = stamp
                try:
                    event(tracker, *facts)
                except Exception:
                    self.log_failure(event)
            self._store_step()
            then()
        finally:
            self._replaying.release()

    def _store_step(self) -> None:
        """Store the open step's number into the place, unless the training thread has recorded more meanwhile."""
        slots = self._place.slots
        slots[Slot.ALIVE_NS] = monotonic_ns()
        number, closed = self._tracker.number, slots[Slot.CLOSED]
        if not self._queue:
            slots[Slot.STEP], slots[Slot.CLOSED_AT_STEP] = number, closed

    def _reset(self) -> None:
        self._queue: deque[Any] = deque()
        self.append = self._queue.extend

    def _shed(self) -> None:
        self.catch_up(0)
        if len(self._queue) > _ENTRY_FIELDS * _MAX_BACKLOG:
            self._reset()
