"""Calls before and after each step of every optimizer, through one pair of torch's hooks.

Torch iterates over its table of hooks while it calls them. A hook that is added or removed meanwhile ends the training
("OrderedDict mutated during iteration"): by a user's hook that attaches or detaches, or by another thread. So the pair
is added while no step is under way, and stays in the process. Without listeners it does nothing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

StepHook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], object]
"""Takes the optimizer, the positional arguments of its `step` and the named ones."""

_STEP = Optimizer.profile_hook_step(id).__code__
"""Code of torch's wrapper around every optimizer's `step`, which calls the hooks."""
_changing = threading.Lock()
_before: tuple[StepHook, ...] = ()
_after: tuple[StepHook, ...] = ()
"""Replaced as a whole: a step that is under way goes on with the listeners that it began with."""
_pair: list[RemovableHandle] = []


def listen(before: StepHook, after: StepHook) -> Callable[[], None]:
    """Call `before` and `after` around each step of every optimizer; the result ends that.

    It may be called anywhere: during a step, in a hook, and on any thread.
    """
    global _before, _after
    with _changing:
        _before, _after = (*_before, before), (*_after, after)
    add_pair()

    def stop() -> None:
        global _before, _after  # noqa: PLW0603
        with _changing:
            _before = tuple(listener for listener in _before if listener is not before)
            _after = tuple(listener for listener in _after if listener is not after)

    return stop


def add_pair() -> bool:
    """Add the pair to torch's tables, unless a step is under way on some thread; return whether it is there."""
    if not _pair and not any(map(_is_in_step, sys._current_frames().values())):
        _pair.extend((register_optimizer_step_pre_hook(_began), register_optimizer_step_post_hook(_ended)))
    return bool(_pair)


def is_in_step() -> bool:
    """Whether the caller runs inside an optimizer's step."""
    return _is_in_step(sys._getframe())


def _is_in_step(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is _STEP:
            return True
        frame = frame.f_back
    return False


def _began(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for listener in _before:
        listener(optimizer, args, kwargs)


def _ended(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for listener in _after:
        listener(optimizer, args, kwargs)
