"""Stamps of the units' collectives by pass: a forward and its backward."""

from __future__ import annotations

from ddpobs.clocks import Stamp
from ddpobs.observers import ModuleObserver

_MAX_PASSES = 1024
"""Passes without a reduction that are kept, as micro-batches of one step. Not every forward has a backward."""


class Pass:
    """Stamps of one pass, 0 where there is none; completions may arrive after its end.

    Args:
        rows: Number of the layout's rows.

    Attributes:
        ready_ns: Per row: what the collective sends is there.
        launched_ns: Per row: it was handed to the process group.
        done_ns: Per row: it is complete.
        waited_from_ns: Per row: training began to wait for it.
    """

    def __init__(self, rows: int) -> None:
        self.ready_ns: list[Stamp] = [0] * rows
        self.launched_ns: list[Stamp] = [0] * rows
        self.done_ns: list[Stamp] = [0] * rows
        self.waited_from_ns: list[Stamp] = [0] * rows


class Passes:
    """Passes since the last reduction, such as micro-batches whose gradients are not reduced, and the one under way.

    Args:
        recorder: Follows the pass under way.

    Attributes:
        rows: Number of the layout's rows.
        current: The pass under way; None before its first collective.
        scattered: Row of the reduce-scatter launched last on a device, which the next unit's waits for.
        last_ready: Stamp of the latest gradients that torch reduces in the backward under way; 0 before the first ones.
    """

    def __init__(self, recorder: ModuleObserver) -> None:
        self._recorder = recorder
        self._earlier: list[Pass] = []
        self.rows = 0
        self.current: Pass | None = None
        self.scattered: int | None = None
        self.last_ready: Stamp = 0

    def begin(self) -> Pass:
        """Begin another pass, and keep the one under way for the record of the step."""
        self._keep()
        self.current = Pass(self.rows)
        self._recorder.reduction_began(self.current.launched_ns, self.current.done_ns)
        return self.current

    def abandon(self) -> None:
        """Drop the stamps of a backward that raised, and of its forward. Earlier passes belong to the open step."""
        self.current, self.scattered, self.last_ready = None, None, 0

    def end(self) -> tuple[list[Pass], Stamp]:
        """End the pass under way with its backward.

        Returns:
            The passes since the last reduction, and the stamp of the latest gradients that this backward reduced; 0
            if it reduced none, and the passes are kept.
        """
        last_ready, self.last_ready = self.last_ready, 0
        self._keep()
        if not last_ready:
            return [], 0
        ended, self._earlier = self._earlier, []
        return ended, last_ready

    def _keep(self) -> None:
        if self.current is not None:
            self._earlier = [*self._earlier[1 - _MAX_PASSES :], self.current]
        self.current, self.scattered = None, None
