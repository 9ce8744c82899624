"""Each kind of hook that torch and Python offer, with the number of its calls."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ddpobs

Hook = Callable[..., None]


@dataclass
class Target:
    """What a hook may be registered on."""

    model: torch.nn.Module
    optimizer: Any

    @property
    def parameter(self) -> torch.nn.Parameter:
        return next(self.model.parameters())


Register = Callable[[Target, Hook], Any]
"""Registers a hook and returns its handle."""


def _by(name: str, owner: Callable[[Target], object]) -> Register:
    """Register by the owner's function of that name."""
    return lambda target, hook: getattr(owner(target), name)(hook)


HANDLED: dict[str, Register] = {
    **{
        name: _by(name, lambda _: modules)
        for name in (
            "register_module_forward_pre_hook",
            "register_module_forward_hook",
            "register_module_full_backward_pre_hook",
            "register_module_full_backward_hook",
            "register_module_module_registration_hook",
            "register_module_parameter_registration_hook",
            "register_module_buffer_registration_hook",
        )
    },
    **{
        f"module.{name}": _by(name, lambda target: target.model)
        for name in (
            "register_forward_pre_hook",
            "register_forward_hook",
            "register_full_backward_pre_hook",
            "register_full_backward_hook",
            "register_state_dict_pre_hook",
            "register_load_state_dict_post_hook",
        )
    },
    **{
        name: _by(name, lambda _: optimizers)
        for name in ("register_optimizer_step_pre_hook", "register_optimizer_step_post_hook")
    },
    **{
        f"optimizer.{name}": _by(name, lambda target: target.optimizer)
        for name in (
            "register_step_pre_hook",
            "register_step_post_hook",
            "register_state_dict_pre_hook",
            "register_state_dict_post_hook",
            "register_load_state_dict_pre_hook",
            "register_load_state_dict_post_hook",
        )
    },
    "tensor.register_hook": lambda target, hook: target.parameter.register_hook(hook),
    "tensor.register_post_accumulate_grad_hook": lambda target, hook: (
        target.parameter.register_post_accumulate_grad_hook(hook)
    ),
    "register_multi_grad_hook": lambda target, hook: torch.autograd.graph.register_multi_grad_hook(
        tuple(target.model.parameters()), hook
    ),
}
"""Hooks with a handle that removes them."""


_PACKAGE = Path(ddpobs.__file__).parent
_OF_REDUCTION = tuple(str(_PACKAGE / name) for name in ("buckets", "comm", "reducer"))


def _is_of_our_reducer() -> bool:
    """Whether our reducer calls the operation; their number depends on the time at which buffers are released."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(str(_PACKAGE)):
            return bool(frame.f_code.co_filename.startswith(_OF_REDUCTION))
        frame = frame.f_back
    return False


class _Functions(TorchFunctionMode):
    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_of_our_reducer():
            self._hook()
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, hook: Hook) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hook = hook

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_of_our_reducer():
            self._hook()
        return func(*args, **(kwargs or {}))


def _saved_tensors(stack: ExitStack, hook: Hook) -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        hook()
        return tensor

    stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))


def _trace(stack: ExitStack, hook: Hook, setter: Callable[[Any], None]) -> None:
    """Count the calls of `provoke`."""

    def traced(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is provoke.__code__:
            hook()

    setter(traced)
    stack.callback(setter, None)


def _uncaught(stack: ExitStack, hook: Hook, owner: Any) -> None:
    previous = owner.excepthook
    owner.excepthook = lambda *_: hook()
    stack.callback(setattr, owner, "excepthook", previous)


def _signal(stack: ExitStack, hook: Hook) -> None:
    previous = signal.signal(signal.SIGUSR1, lambda *_: hook())
    stack.callback(signal.signal, signal.SIGUSR1, previous)


def _warnings(stack: ExitStack, hook: Hook) -> None:
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("always")
    warnings.showwarning = lambda *_, **__: hook()


Enter = Callable[[ExitStack, Hook], object]
ENTERED: dict[str, Enter] = {
    "saved_tensors_hooks": _saved_tensors,
    "save_on_cpu": lambda stack, _: stack.enter_context(torch.autograd.graph.save_on_cpu()),
    "TorchFunctionMode": lambda stack, hook: stack.enter_context(_Functions(hook)),
    "TorchDispatchMode": lambda stack, hook: stack.enter_context(_Operations(hook)),
    "sys.settrace": lambda stack, hook: _trace(stack, hook, sys.settrace),
    "sys.setprofile": lambda stack, hook: _trace(stack, hook, sys.setprofile),
    "sys.excepthook": lambda stack, hook: _uncaught(stack, hook, sys),
    "threading.excepthook": lambda stack, hook: _uncaught(stack, hook, threading),
    "signal handler": _signal,
    "warnings": _warnings,
}
"""Hooks that are on in a block."""


def provoke() -> None:
    """Call the hooks that a training does not call itself."""

    def fail() -> None:
        raise ValueError("of the user's thread")

    os.kill(os.getpid(), signal.SIGUSR1)
    warnings.warn("of the user's", stacklevel=1)
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    sys.excepthook(ValueError, ValueError("of the user's"), None)
