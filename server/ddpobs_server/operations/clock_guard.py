"""A witness of the wall clock: elapsed time of a clock that is never set."""

from __future__ import annotations

import time
from collections.abc import Callable

_TOLERANCE_NS = 300 * 10**9
"""Maximum difference of both clocks between two rounds. Daily corrections are far smaller."""


def elapsed_ns() -> int:
    """Time since the boot, including suspension; the monotonic clock of some systems stops meanwhile."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime_ns(clock)


class ClockGuard:
    """Compares the wall clock with elapsed time, since the last accepted time.

    Args:
        elapsed_ns: Clock that is never set.
    """

    def __init__(self, elapsed_ns: Callable[[], int] = elapsed_ns) -> None:
        self._elapsed_ns = elapsed_ns
        self._accepted: tuple[int, int] | None = None

    def accept(self, now_ns: int) -> None:
        """Compare later times with this time."""
        self._accepted = now_ns, self._elapsed_ns()

    def jump_s(self, now_ns: int) -> float:
        """Seconds by which the wall clock was set forward (or back, if negative).

        Zero within the tolerance, and before the first accepted time.
        """
        if self._accepted is None:
            return 0.0
        wall_ns, mark_ns = self._accepted
        jump_ns = (now_ns - wall_ns) - (self._elapsed_ns() - mark_ns)
        return jump_ns / 1e9 if abs(jump_ns) > _TOLERANCE_NS else 0.0
