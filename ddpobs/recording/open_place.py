"""Where the training thread is: stores into the process's place, which outlives it."""

from __future__ import annotations

from time import monotonic_ns

from ddpobs.recording.place.last_place import Slots, memory_slots
from ddpobs.recording.place.place_file import Slot
from ddpobs.steps.raw_step import OTHER

_PHASE, _AT_NS, _CLOSED, _SYNCHRONISED = map(int, (Slot.PHASE, Slot.AT_NS, Slot.CLOSED, Slot.SYNCHRONISED))


class OpenPlace:
    """The place of the open step.

    Args:
        slots: The process's place (`last_place.LastPlace`); None for one in memory.

    Attributes:
        slots: The process's place. In a forked child it is in memory.
        last_bucket: The slot for the bucket that was launched last.
        reduced: Gradients were reduced in the open step.
        optimized: An optimizer has run since then.
    """

    def __init__(self, slots: Slots | None) -> None:
        self._use(memory_slots() if slots is None else slots)
        self.reduced = self.optimized = False
        self._reduced_in_backward = False

    def enter(self, phase: int) -> None:
        """Store phase and time."""
        slots = self.slots
        slots[_PHASE], slots[_AT_NS] = phase, monotonic_ns()

    def is_in(self, phase: int) -> bool:
        """Whether the training thread is in that phase."""
        return self.slots[_PHASE] == phase

    @property
    def awaits_forward(self) -> bool:
        """Whether the training thread is between the end of a step, or of a micro-step, and the next forward."""
        return self.is_in(OTHER) and (self.optimized or not self.reduced)

    def gradients_reduced(self) -> None:
        """Gradients were reduced in the backward under way."""
        self.reduced = self._reduced_in_backward = True
        self.optimized = False

    def backward_ended(self) -> bool:
        """Count the backward if it was synchronised, and return whether it was."""
        if not self._reduced_in_backward:
            return False
        self._reduced_in_backward = False
        self.count_synchronised()
        return True

    def count_synchronised(self) -> None:
        """Count a synchronised backward."""
        self.slots[_SYNCHRONISED] += 1

    def close_step(self) -> None:
        """Count a finished step."""
        self.reduced = False
        self.slots[_CLOSED] += 1

    def step_rested(self) -> None:
        """Count a step in which telemetry rested."""
        slots = self.slots
        slots[_AT_NS] = monotonic_ns()
        slots[_CLOSED] += 1
        slots[_SYNCHRONISED] += 1

    def reset_after_fork(self) -> None:
        """Begin a place of a forked child."""
        self._use(memory_slots())

    def _use(self, slots: Slots) -> None:
        self.slots, self.last_bucket = slots, slots[Slot.BUCKET : Slot.BUCKET + 1]
