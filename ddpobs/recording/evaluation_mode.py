"""Whether the modules' evaluation mode marks an evaluation: some trainings run in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

_MOST_FETCHES = 64
"""More evaluations than there are between two looks."""


class EvaluationMode:
    """The mode of all DDP modules.

    Attributes:
        covers_all: Returns whether every module is in evaluation mode.
        fetched_after: Training forwards before each of the latest requests for batches in evaluation mode.
        trains: In the last reduction every module was in evaluation mode: the mode does not mark evaluations.
    """

    def __init__(self) -> None:
        self.covers_all: Callable[[], bool | None] = lambda: False
        self.trains = False
        self.fetched_after: deque[int] = deque(maxlen=_MOST_FETCHES)
        self._last_forward_trained = False
        """The last forward was a training one, not in evaluation mode."""

    def is_evaluating(self) -> bool:
        """Whether training is interrupted by an evaluation."""
        return not self.trains and bool(self.covers_all())

    def fetch_began(self, forwards: int) -> None:
        """A batch was requested in evaluation mode, after so many training forwards."""
        if not self.fetched_after or self.fetched_after[-1] != forwards:
            self.fetched_after.append(forwards)

    def forward_began(self, training: bool) -> None:
        """A forward was called, in training or not."""
        self._last_forward_trained = training and not self.trains

    def gradients_reduced(self) -> bool:
        """Gradients were reduced; return whether this shows, for the first time, that evaluation mode trains."""
        trained, self.trains = self.trains, not self._last_forward_trained and bool(self.covers_all())
        return self.trains and not trained
