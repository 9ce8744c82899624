"""Time in `torch.compile`, by the synchronised backward whose own time contains it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ddpobs.steps.distinct import distinct
from ddpobs.wire import Ints

ReadCompilations = Callable[[], Sequence[tuple[int, int]] | None]
"""Returns begin and end of the compilations since the last call; None if they are not reported."""
_MAX_WAITING = 64
"""Maximum number of compilations that wait for the steps of their time."""


class CompilePieces(NamedTuple):
    """Pieces of compilations in ascending order, each within one window: shape [pieces].

    `window` is the index of the first synchronised backward whose gradients were ready after the piece.
    """

    begin_ns: Ints
    end_ns: Ints
    window: Ints


class CompileTime:
    """Cuts compilations at the ends of windows.

    Args:
        read: Source of the compilations.
    """

    def __init__(self, read: ReadCompilations) -> None:
        self._read = read
        self._waiting: list[tuple[int, int]] = []

    def pieces(self, from_ns: int, until_ns: int, ready_ns: Ints) -> CompilePieces | None:
        """Return the pieces within the steps that are at hand; later parts wait. None if they are not reported.

        Args:
            from_ns: Start of the first step.
            until_ns: End of the last step.
            ready_ns: Readiness of the last gradient of each synchronised backward.
        """
        new = self._read()
        if new is None:
            return None
        intervals = [*self._waiting, *new]
        self._waiting = [(max(began, until_ns), ended) for began, ended in intervals if ended > until_ns][
            -_MAX_WAITING:
        ]
        bounds_ns = np.maximum.accumulate(ready_ns)
        begins, ends = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for began, ended in sorted(intervals):
            first, last = max(began, from_ns), min(ended, until_ns)
            if first < last:
                inside = bounds_ns[(bounds_ns > first) & (bounds_ns < last)]
                cuts = distinct(np.concatenate([[first], inside, [last]]))
                begins.append(cuts[:-1])
                ends.append(cuts[1:])
        begin_ns = np.concatenate(begins)
        return CompilePieces(begin_ns, np.concatenate(ends), np.searchsorted(bounds_ns, begin_ns, side="right"))
