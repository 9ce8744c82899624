"""Whether the modules' evaluation mode marks an evaluation: some trainings run in it."""

from __future__ import annotations

from collections.abc import Callable


class EvaluationMode:
    """The mode of all DDP modules.

    Attributes:
        covers_all: Returns whether every module is in evaluation mode.
        trains: In the last reduction every module was in evaluation mode: the mode does not mark evaluations.
    """

    def __init__(self) -> None:
        self.covers_all: Callable[[], bool | None] = lambda: False
        self.trains = False
        self._last_forward_trained = False
        """The last forward was a training one, not in evaluation mode."""

    def is_evaluating(self) -> bool:
        """Whether training is interrupted by an evaluation."""
        return not self.trains and bool(self.covers_all())

    def forward_began(self, training: bool) -> None:
        """A forward was called, in training or not."""
        self._last_forward_trained = training and not self.trains

    def gradients_reduced(self) -> bool:
        """Gradients were reduced; return whether this shows, for the first time, that evaluation mode trains."""
        trained, self.trains = self.trains, not self._last_forward_trained and bool(self.covers_all())
        return self.trains and not trained
