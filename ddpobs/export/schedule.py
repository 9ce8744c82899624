"""Times of the telemetry thread's work: the same moments on all ranks.

While the thread holds the GIL, a gradient hook may wait, and every other rank waits with it. Delays at different
moments would add up over the ranks. So the threads of all ranks wake at the same multiples of the period by the wall
clock, as in Petrini, Kerbyson and Pakin, "The case of the missing supercomputer performance" (SC 2003).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

SLACK_S = 0.02
"""Work that is due within this time is done at once, so that the thread wakes up less often."""
DONE = object()
"""Return value of a periodic call that ends its repetition."""


@dataclass
class _Periodic:
    seconds: float
    call: Callable[[], object]
    due: float


class Schedule:
    """Periodic calls, and the flush of records.

    Args:
        flush_s: Period of the flush.

    Attributes:
        flush_due: `time.monotonic` of the next flush.
    """

    def __init__(self, flush_s: float) -> None:
        self._flush_s = flush_s
        self.flush_due = _next(flush_s)
        self._periodic: list[_Periodic] = []

    def call_every(self, seconds: float, call: Callable[[], object]) -> None:
        """Call a function periodically, first at once, until it returns `DONE`."""
        self._periodic.append(_Periodic(seconds, call, time.monotonic()))

    @property
    def calls(self) -> list[Callable[[], object]]:
        """The periodic calls."""
        return [periodic.call for periodic in self._periodic]

    def pause_s(self) -> float:
        """Return the time until work is due; never zero, because a fork may be waiting for the thread to pause."""
        due = min([self.flush_due, *(periodic.due for periodic in self._periodic)])
        return max(SLACK_S / 2, due - time.monotonic())

    def run_due(self, run: Callable[[Callable[[], object]], object]) -> None:
        """Run the periodic calls that are due."""
        soon = time.monotonic() + SLACK_S
        for periodic in [periodic for periodic in self._periodic if periodic.due <= soon]:
            periodic.due = _next(periodic.seconds)
            if run(periodic.call) is DONE:
                self._periodic.remove(periodic)

    def take_flush(self) -> bool:
        """Whether a flush is due; the next one is then a period later."""
        is_due = self.flush_due <= time.monotonic() + SLACK_S
        if is_due:
            self.flush_due = _next(self._flush_s)
        return is_due


def _next(seconds: float) -> float:
    """Return the `time.monotonic` of the wall clock's next multiple of a period, except one that is already due."""
    soon = time.time() + SLACK_S
    return time.monotonic() + SLACK_S + seconds - soon % seconds
