"""When the model of an observed optimizer is called. The model may be saved, copied or scripted: nothing is left on it.

What is wrapped is its class, while one of the class is watched. A hook on all modules' forwards would cost each of
them a microsecond, break the graphs of `torch.compile` at every module, and not be shown keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import finalize, ref

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from ddpobs.recording.journal import never_raises
from ddpobs.torch_seam.patching import Patches

if TYPE_CHECKING:
    from ddpobs.recording.module_recorder import ModuleRecorder

Method = tuple[type[torch.nn.Module], str]


class Model(torch.nn.Module):
    """Stands for the model, which an optimizer does not know, until its first forward shows it."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__()
        self.trained = torch.nn.ParameterList(parameters)


@dataclass
class _Watched:
    """A module that optimizers are watching.

    Attributes:
        method: What is wrapped for it. What this inherits from may be wrapped as well, for another module.
        recorders: One per optimizer; the first is told, as a forward is one forward however many optimizers there are.
    """

    method: Method
    recorders: list[ModuleRecorder] = field(default_factory=list)


_watched: dict[int, _Watched] = {}
"""By the id of the module, which every optimizer's `Model` keeps alive."""
_wrapped: dict[Method, Patches] = {}


def watch(model: Model, recorder: ModuleRecorder) -> None:
    """Find the first module that is called and has one of these parameters, and tell of its forwards.

    Ends with `model`.
    """
    ours, standing_for = set(map(id, model.trained)), ref(model)

    @never_raises
    def look(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        model = standing_for()
        if model is None or not any(id(parameter) in ours for parameter in module.parameters()):
            return
        handle.remove()
        told = id(module) in _watched
        _found(model, module, recorder)
        if not told:
            recorder.forward_began(inputs)

    # Where the first forward is a compiled one, what a skipped function calls is compiled nevertheless.
    handle = register_module_forward_pre_hook(torch.compiler.disable(look))
    finalize(model, handle.remove).atexit = False


def _found(model: Model, module: torch.nn.Module, recorder: ModuleRecorder) -> None:
    model.module = module
    if id(module) not in _watched:
        method = _method(module)
        if method not in _wrapped:
            _wrapped[method] = _wrap(method)
        _watched[id(module)] = _Watched(method)
    _watched[id(module)].recorders.append(recorder)
    finalize(model, _forget, id(module), recorder).atexit = False


def _forget(number: int, recorder: ModuleRecorder) -> None:
    watched = _watched[number]
    watched.recorders.remove(recorder)
    if watched.recorders:
        return
    del _watched[number]
    if all(other.method != watched.method for other in _watched.values()):
        _wrapped.pop(watched.method).undo()


def _method(module: torch.nn.Module) -> Method:
    """The method that every call of the module passes.

    `torch.compile` may hold its `__call__` from before; `Module.compile` holds `_call_impl`.
    """
    return type(module), "_call_impl" if module._compiled_call_impl is None else "__call__"


def _wrap(method: Method) -> Patches:
    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            _called(method, self, args, kwargs)
            return original(self, *args, **kwargs)

        return call

    patches = Patches()
    patches.put(*method, around)
    return patches


def _called(method: Method, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    watched = _watched.get(id(module))
    if watched is not None and watched.method == method:
        for recorder in watched.recorders[:1]:  # Empty where the last optimizer is collected just now.
            recorder.forward_began(args, kwargs)
