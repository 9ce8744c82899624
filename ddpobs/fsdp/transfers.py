"""Stamps of one collective of a unit, from its launch to its completion."""

from __future__ import annotations

from collections.abc import Callable

from ddpobs.clocks import Stamp
from ddpobs.fsdp.passes import Pass
from ddpobs.observers import ModuleObserver


class Transfer:
    """A collective that has a row; it is launched now.

    Args:
        of: The pass that it belongs to.
        row: Its row.
        now: Takes a stamp.
        waits: The thread that launches it waits for it.
    """

    def __init__(self, of: Pass, row: int, now: Callable[[], Stamp], waits: bool) -> None:
        self._of, self._row, self._now = of, row, now
        launched = of.launched_ns[row] = now()
        of.ready_ns[row] = of.ready_ns[row] or launched
        if waits:
            of.waited_from_ns[row] = launched

    def goes_on(self) -> None:
        """Forget the wait at the launch: the call returns before the collective is complete."""
        self._of.waited_from_ns[self._row] = 0

    def ended(self) -> None:
        """Stamp the completion."""
        self._of.done_ns[self._row] = self._now()


class OtherTransfer:
    """A collective without a row: an all-gather of a forward without gradients, as of an evaluation or a teacher.

    Args:
        recorder: Records it as communication beside the units'.
    """

    def __init__(self, recorder: ModuleObserver) -> None:
        self._recorder, self._launched = recorder, recorder.now()

    def goes_on(self) -> None:
        """Nothing: it counts as communication until it is complete."""

    def ended(self) -> None:
        """Record it."""
        self._recorder.communicated("user", self._launched, self._recorder.now())


Stamped = Transfer | OtherTransfer


class AllReduceWait:
    """Stamps an all-reduce over replicas, of which only the wait is visible.

    Args:
        start: Begins the transfer; called once.
    """

    def __init__(self, start: Callable[[], Stamped | None]) -> None:
        self._start = start
        self._transfer: Stamped | None = None

    def wait_began(self) -> None:
        """Stamp the launch; the call of torch's function may wait, and the work that it returns."""
        if self._transfer is None:
            self._transfer = self._start()

    def wait_ended(self) -> None:
        """Stamp the completion."""
        if self._transfer is not None:
            self._transfer.ended()
