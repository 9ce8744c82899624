"""The rest of a collective of a unit whose launch is stamped, if it may go on when its call returns, or has no row."""

from __future__ import annotations

from collections.abc import Callable

from ddpobs.clocks import Stamp
from ddpobs.fsdp.passes import Pass
from ddpobs.observers import ModuleObserver


class Transfer:
    """A collective that has a row.

    Args:
        of: The pass that it belongs to.
        row: Its row.
        now: Takes a stamp.
    """

    def __init__(self, of: Pass, row: int, now: Callable[[], Stamp]) -> None:
        self._of, self._row, self._now = of, row, now

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
