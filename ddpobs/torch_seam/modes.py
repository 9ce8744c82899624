"""Keeps telemetry's own operations on tensors out of a user's `TorchFunctionMode` and `TorchDispatchMode`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")
_functions, _dispatchers = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack


def unseen(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a call so that no mode receives its operations. A mode may count operations, change or refuse them."""

    @wraps(call)
    def hidden(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not (_functions() or _dispatchers()):
            return call(*args, **kwargs)
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            return call(*args, **kwargs)

    return hidden
