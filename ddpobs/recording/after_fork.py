"""What begins anew in a forked child, such as a loader's worker."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Forked(Protocol):
    """An object that begins anew in a forked child."""

    def reset_after_fork(self) -> None:
        """Begin anew."""
        ...


_forked: WeakSet[Forked] = WeakSet()


def reset_after_fork(held: Forked) -> None:
    """Reset an object in each forked child, as long as it lives."""
    _forked.add(held)


def _reset_all() -> None:
    for held in list(_forked):
        held.reset_after_fork()


os.register_at_fork(after_in_child=_reset_all)
