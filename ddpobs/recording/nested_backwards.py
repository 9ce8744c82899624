"""Forward and backward passes that a hook runs inside an outer backward, as cached contrastive losses do.

A forward inside a backward is either such a pass, or checkpointing's repetition. Checkpointing is recognised by the
call stack. Any other forward with gradients waits here. It is recorded when a backward follows in the same graph task.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ddpobs.clocks import Stamp

_MAX_FORWARDS = 1_000
"""Forwards that may wait. A hook that runs only forwards with gradients would otherwise collect them."""


class NestedForward(NamedTuple):
    """A training forward inside a backward.

    Attributes:
        task: Number of the graph task whose hook called it.
        began: Stamp of the call.
        module: Index of the DDP module.
        samples: Rows of its input.
    """

    task: int
    began: Stamp
    module: int
    samples: int


class NestedBackwards:
    """Backward calls under way inside the outermost one, and forwards that wait for a backward of their own."""

    def __init__(self) -> None:
        self._forwards: deque[NestedForward] = deque(maxlen=_MAX_FORWARDS)
        self._have_forward: list[bool] = []
        """For each nested backward under way, whether a recorded forward belongs to it; the innermost is last."""
        self._reduced = False
        """Gradients were reduced since the last nested backward ended."""

    def __bool__(self) -> bool:
        """Whether a nested backward is under way."""
        return bool(self._have_forward)

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
        self._have_forward.append(bool(forwards))
        self._reduced = False
        return forwards

    def gradients_reduced(self) -> None:
        """Gradients were reduced inside the innermost backward."""
        self._reduced = True

    def backward_ended(self) -> tuple[bool, bool]:
        """End the innermost backward; return whether it has a forward, and whether gradients were reduced in it."""
        reduced, self._reduced = self._reduced, False
        return self._have_forward.pop(), reduced

    def forget(self) -> None:
        """Drop everything: the outermost backward has ended."""
        self._forwards.clear()
        self._have_forward.clear()
