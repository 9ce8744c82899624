"""Stamps of an engine's collectives in one pass: a forward, its backward, and the step after the last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ddpobs.clocks import Stamp
from ddpobs.observers import ModuleObserver


class Pass:
    """Stamps of one pass, 0 where there is none.

    Args:
        rows: Number of rows that have a place in it.

    Attributes:
        ready_ns: Per row: what the collective sends is there.
        launched_ns: Per row: it was handed to the process group.
        done_ns: Per row: it is complete.
        waited_from_ns: Per row: training began to wait for it.
        launches: Launches so far by phase, kind, type and size.
    """

    def __init__(self, rows: int) -> None:
        self.ready_ns: list[Stamp] = [0] * rows
        self.launched_ns: list[Stamp] = [0] * rows
        self.done_ns: list[Stamp] = [0] * rows
        self.waited_from_ns: list[Stamp] = [0] * rows
        self.launches: Counter[tuple[str, str, str, int]] = Counter()


class Transfer:
    """One collective, from its launch to its completion.

    Args:
        of: The pass that it belongs to.
        row: Its row.
        now: Takes a stamp.
    """

    def __init__(self, of: Pass, row: int, now: Callable[[], Stamp]) -> None:
        self._pass, self._now = of, now
        self.row: int = row
        of.ready_ns[row] = of.launched_ns[row] = now()

    def returned(self) -> None:
        """Stamp the completion; training has waited for it since the launch."""
        self._pass.waited_from_ns[self.row] = self._pass.launched_ns[self.row]
        self.wait_ended()

    def wait_began(self) -> None:
        """Stamp the begin of training's wait."""
        self._pass.waited_from_ns[self.row] = self._now()

    def wait_ended(self) -> None:
        """Stamp the completion, unless that was done."""
        if not self._pass.done_ns[self.row]:
            self._pass.done_ns[self.row] = self._now()


class OtherTransfer:
    """A collective without a row, such as one of an evaluation.

    Args:
        recorder: Records the wait for it as communication beside the rows.
    """

    row: int | None = None

    def __init__(self, recorder: ModuleObserver) -> None:
        self._recorder, self._began = recorder, recorder.now()

    def returned(self) -> None:
        """Record the wait, which began with the launch."""
        self._recorder.communicated("user", self._began, self._recorder.now())

    def wait_began(self) -> None:
        """Stamp the begin of training's wait."""
        self._began = self._recorder.now()

    def wait_ended(self) -> None:
        """Record the wait."""
        self.returned()


Stamped = Transfer | OtherTransfer
