"""Functions of other people's that are wrapped for a while, and put back."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

_INHERITED = object()


class Patches:
    """Some wrapped attributes, put back together."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def put(self, owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Have `owner.name` be what `around` makes of it; `__wrapped__` leads to the original."""
        original, own = getattr(owner, name), vars(owner).get(name, _INHERITED)
        wrapped = wraps(original)(around(original))
        setattr(owner, name, wrapped)

        def undo() -> None:
            # Someone may have wrapped ours meanwhile; then it stays, and costs a call.
            if getattr(owner, name, None) is not wrapped:
                return
            if own is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

        self._undo.append(undo)

    def undo(self) -> None:
        """Put all of them back, the last one first."""
        while self._undo:
            self._undo.pop()()


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """What stands under the wrappings."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


@cache
def skip_in_dynamo() -> None:
    """Have `torch.compile` pass over ddpobs' own functions, as over torch's DDP: it compiles the model inside."""
    from torch._dynamo import trace_rules

    trace_rules.add("ddpobs")
