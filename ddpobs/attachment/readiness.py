"""When each parameter's gradient arrived in one backward of torch's DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import torch


class Readiness:
    """Stamps of the gradients that arrived since the last synchronised backward.

    Args:
        parameters: Number of parameters.
        now: Takes a stamp.

    Attributes:
        stamps: Per parameter; 0 before its gradient arrived.
    """

    def __init__(self, parameters: int, now: Callable[[], Any]) -> None:
        self.stamps: list[Any] = [0] * parameters
        self._order, self._next, self._now = [0] * parameters, count(1), now
        """The order is kept beside the stamps, because a device's stamps cannot be compared."""
        self._used_before: set[int] = set()
        """Parameters used under `no_sync`, which torch's map of used parameters includes."""

    def stamper(self, index: int) -> Callable[[torch.Tensor], None]:
        """Return the hook of one parameter."""
        stamps, order, now, following = self.stamps, self._order, self._now, self._next

        def stamp(_: torch.Tensor) -> None:
            stamps[index] = now()
            order[index] = next(following)

        return stamp

    @property
    def any_arrived(self) -> bool:
        """Whether a gradient arrived."""
        return any(self.stamps)

    def arrived(self) -> list[int]:
        """Indices of the parameters whose gradient arrived."""
        return [index for index, stamp in enumerate(self.stamps) if stamp]

    def is_used(self, members: Iterable[int]) -> bool:
        """Whether one of these parameters was used, in this backward or under `no_sync` before it."""
        return any(self.stamps[index] or index in self._used_before for index in members)

    def unused(self) -> list[int]:
        """Indices of the parameters that were not used."""
        return [index for index in range(len(self.stamps)) if not self.is_used((index,))]

    def last(self, members: Iterable[int]) -> Any:
        """Stamp of the gradient that arrived last among these parameters; 0 without one."""
        arrived = [index for index in members if self.stamps[index]]
        return self.stamps[max(arrived, key=self._order.__getitem__)] if arrived else 0

    def keep_used(self) -> None:
        """Count the parameters with a gradient as used in the next synchronised backward too."""
        self._used_before.update(self.arrived())

    def clear(self) -> None:
        """Forget the stamps."""
        self.stamps[:] = [0] * len(self.stamps)

    def end(self) -> None:
        """Forget the stamps and what was used: a synchronised backward has ended."""
        self.clear()
        self._used_before.clear()
