"""Forward and backward passes that a hook runs inside an outer backward, as cached contrastive losses do.

A forward with gradients inside a backward waits here. It is recorded when a backward follows in the same graph task.
A reentrant checkpoint of the whole DDP module is such a pass too: its first forward ran without gradients. A checkpoint
without reentry repeats a forward that was recorded; the journal leaves that one out.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ddpobs.clocks import Stamp
from ddpobs.steps.raw_step import InputSize

_MAX_FORWARDS = 1_000
"""Forwards that may wait. A hook that runs only forwards with gradients would otherwise collect them."""


class NestedForward(NamedTuple):
    """A training forward inside a backward.

    Attributes:
        task: Number of the graph task that runs the calling hook.
        began: Stamp of the call.
        module: Index of the DDP module.
        size: Size of its input.
        repeats: A reentrant checkpoint repeats it: its time stays part of the outer backward.
    """

    task: int
    began: Stamp
    module: int
    size: InputSize
    repeats: bool


class NestedBackwards:
    """Backward calls under way inside the outermost one, and forwards that wait for a backward of their own."""

    def __init__(self) -> None:
        self._forwards: deque[NestedForward] = deque(maxlen=_MAX_FORWARDS)
        self._are_passes: list[bool] = []
        """For each nested backward under way, whether it is a pass with a forward; the innermost is last."""
        self._reduced = False
        """Gradients were reduced since the last nested backward ended."""

    def __bool__(self) -> bool:
        """Whether a nested backward is under way."""
        return bool(self._are_passes)

    def forward_began(self, forward: NestedForward) -> None:
        """Keep a forward until a backward of the same graph task follows it."""
        self._forwards.append(forward)

    def has_forward(self, task: int) -> bool:
        """Whether a forward of that graph task waits."""
        return any(forward.task == task for forward in self._forwards)

    def backward_began(self, task: int) -> list[NestedForward]:
        """Begin a nested backward, called in that graph task; return the forwards that belong to it."""
        forwards = [forward for forward in self._forwards if forward.task == task]
        self._forwards.clear()
        self._are_passes.append(any(not forward.repeats for forward in forwards))
        self._reduced = False
        return forwards

    def gradients_reduced(self) -> None:
        """Gradients were reduced inside the innermost backward."""
        self._reduced = True

    def backward_ended(self) -> tuple[bool, bool]:
        """End the innermost backward; return whether it is a pass, and whether gradients were reduced in it."""
        reduced, self._reduced = self._reduced, False
        return self._are_passes.pop(), reduced

    def forget(self) -> None:
        """Drop everything: the outermost backward has ended."""
        self._forwards.clear()
        self._are_passes.clear()
