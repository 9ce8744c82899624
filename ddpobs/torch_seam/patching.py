"""Temporary wrappers around functions of other packages."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

_INHERITED = object()


class Patches:
    """Wrapped attributes, restored together."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def put(self, owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace `owner.name` by `around(owner.name)`; `__wrapped__` refers to the original."""
        original, own = getattr(owner, name), vars(owner).get(name, _INHERITED)
        wrapped = wraps(original)(around(original))
        setattr(owner, name, wrapped)

        def undo() -> None:
            # If other code has wrapped the wrapper meanwhile, it stays, and costs a call.
            if getattr(owner, name, None) is not wrapped:
                return
            if own is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

        self._undo.append(undo)

    def undo(self) -> None:
        """Restore all attributes, the last first."""
        while self._undo:
            self._undo.pop()()


def unwrap(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside all wrappers."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


@cache
def skip_in_dynamo() -> None:
    """Make `torch.compile` skip ddpobs' functions, as it skips torch's DDP; it compiles the model inside."""
    from torch._dynamo import trace_rules

    trace_rules.add("ddpobs")
