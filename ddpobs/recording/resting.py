"""Rests of telemetry: blocks of steps in which its hooks return at once, to measure what they cost.

A rest begins and ends where a step does. Ranks count the same synchronised backward passes, so all rest together
without a message. In a rest nothing is recorded but the start of each backward, by the host's clock. This keeps the
process's place and the numbers of steps and collectives right; a hang in a rest names no phase and no bucket.
"""

from __future__ import annotations

from threading import Event
from time import monotonic_ns
from typing import Any

from ddpobs.clocks import Clock
from ddpobs.never_raises import never_raises
from ddpobs.recording.entries import Entries
from ddpobs.recording.open_place import OpenPlace
from ddpobs.recording.probes.counter_reader import CounterReader
from ddpobs.recording.training_thread import TrainingThread
from ddpobs.recording.waits import Waits
from ddpobs.steps.own_cost import OwnCost
from ddpobs.steps.raw_step import OTHER
from ddpobs.steps.step_tracker import StepTracker


class Resting:
    """Decides when telemetry rests.

    Args:
        clock: Source of stamps.
        thread: The training thread, on which hooks return at once while it is paused.
        place: Where it is.
        entries: Its events.
        waits: Counts evaluations and checkpoints.
    """

    def __init__(self, clock: Clock, thread: TrainingThread, place: OpenPlace, entries: Entries, waits: Waits) -> None:
        self._now = clock.now
        self._thread, self._place, self._entries, self._waits = thread, place, entries, waits
        self._cost: OwnCost | None = None
        self._replayed: OwnCost | None = None  # Stays after the end, for entries that still wait.
        self._counters: CounterReader | None = None
        self._awake = Event()
        self._rests = False
        self._backwards = self._forwards = self._interruptions = 0

    def measure(self, cost: OwnCost | None, counters: CounterReader, awake: Event) -> None:
        """Rest from now on.

        Args:
            cost: Times the steps; None to rest never.
            counters: Begins a new series after a rest.
            awake: Set except during a rest, for which the telemetry threads wait.
        """
        self._cost = self._replayed = cost
        self._counters, self._awake = counters, awake
        awake.set()

    def begin_if_due(self) -> bool:
        """Begin a rest at the end of a step; return whether telemetry rests."""
        if self._cost is None or not self._cost.rests.rests(self._backwards):
            return False
        self._entries.record(StepTracker.rest_began, self._now())
        self._place.enter(OTHER)
        self._rests = self._thread.paused = True
        self._awake.clear()
        return True

    def end_if_over(self) -> bool:
        """End a rest if it is over, at a fetch or a training forward; return whether it is."""
        if not self._rests or self._cost is None or self._cost.rests.rests(self._backwards):
            return False
        self._rests = self._thread.paused = False
        if self._counters is not None:
            self._counters.begin_series()
        self._awake.set()
        return True

    def forward_began(self, training: bool) -> bool:
        """Count a forward, and end a rest that is over; return whether nothing is recorded."""
        self._forwards += training
        if not self._thread.paused:
            return False
        self._waits.interruptions += not training
        return not (training and self.end_if_over())

    def stop(self) -> None:
        """Rest no more: training ends, or is captured in a CUDA graph."""
        self._cost = None
        if self._rests:
            self._rests = self._thread.paused = False
        self._awake.set()

    @never_raises
    def backward_began(self, has_data: bool = True) -> None:
        """A synchronised backward began; without `has_data` this rank only takes part in the others'."""
        if self._cost is None:
            return
        number, self._backwards = self._backwards, self._backwards + 1
        forwards, self._forwards = self._forwards, 0
        disturbed = not has_data or self._interruptions != self._waits.interruptions
        self._interruptions = self._waits.interruptions
        self._entries.record(self._replay, 0, number, monotonic_ns(), self._rests, forwards, disturbed)
        if self._rests and has_data:
            self._place.step_rested()

    def _replay(self, tracker: StepTracker, number: int, *facts: Any) -> None:
        """Time the step on the replaying thread, and count it if it rested."""
        at_ns, rested, forwards, disturbed = facts
        if rested:
            tracker.step_rested()
        if self._replayed is not None:
            self._replayed.backward_began(number, at_ns, rested, forwards, disturbed)
