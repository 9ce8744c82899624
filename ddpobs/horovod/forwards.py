"""Records the forwards of an optimizer's model. The model may be saved, copied or scripted, so it stays unchanged.

The model's class is wrapped, while a module of that class is watched. A hook on all modules' forwards would cost each
module a microsecond, break the graphs of `torch.compile` at every module, and receive no keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import finalize, ref

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from ddpobs.never_raises import never_raises
from ddpobs.torch_seam.patching import Patches

if TYPE_CHECKING:
    from ddpobs.observers import ModuleObserver

Method = tuple[type[torch.nn.Module], str]


class Model(torch.nn.Module):
    """Stands for the model, which an optimizer does not have; the first forward reveals the real one."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__()
        # Put in directly: a user's hooks on registrations do not see this module.
        self._parameters.update({str(index): parameter for index, parameter in enumerate(parameters)})


@dataclass
class _Watched:
    """A module that optimizers are watching.

    Attributes:
        method: The method that is wrapped for it. An inherited method may be wrapped as well, for another module.
        recorders: One per optimizer. Only the first records forwards, so that a forward counts once.
    """

    method: Method
    recorders: list[ModuleObserver] = field(default_factory=list)


_watched: dict[int, _Watched] = {}
"""By the id of the module, which every optimizer's `Model` keeps alive."""
_wrapped: dict[Method, Patches] = {}


def watch(model: Model, recorder: ModuleObserver) -> None:
    """Record the forwards of the first called module that has one of the model's parameters.

    Stops when `model` is garbage-collected.
    """
    trained, reference = set(map(id, model.parameters())), ref(model)

    @never_raises
    def find_model(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        model = reference()
        if model is None:
            handle.remove()
            return
        if not any(id(parameter) in trained for parameter in module.parameters()):
            return
        handle.remove()
        is_recorded = id(module) in _watched
        _watch_module(model, module, recorder)
        if not is_recorded:
            recorder.forward_began(inputs)

    # If the first forward is compiled, dynamo skips ddpobs' functions but compiles the functions that they call.
    # Only the hook removes itself. A garbage collection may come while torch iterates over the hooks.
    handle = register_module_forward_pre_hook(torch.compiler.disable(find_model))


def _watch_module(model: Model, module: torch.nn.Module, recorder: ModuleObserver) -> None:
    model._modules["module"] = module
    if id(module) not in _watched:
        method = _method_of(module)
        if method not in _wrapped:
            _wrapped[method] = _wrap(method)
        _watched[id(module)] = _Watched(method)
    _watched[id(module)].recorders.append(recorder)
    finalize(model, _unwatch, id(module), recorder).atexit = False


def _unwatch(module_id: int, recorder: ModuleObserver) -> None:
    watched = _watched[module_id]
    watched.recorders.remove(recorder)
    if watched.recorders:
        return
    del _watched[module_id]
    if all(other.method != watched.method for other in _watched.values()):
        _wrapped.pop(watched.method).undo()


def _method_of(module: torch.nn.Module) -> Method:
    """The method that runs in every call of the module.

    `torch.compile` may hold the unwrapped `__call__`; `Module.compile` holds `_call_impl`.
    """
    return type(module), "_call_impl" if module._compiled_call_impl is None else "__call__"


def _wrap(method: Method) -> Patches:
    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            _record_call(method, self, args, kwargs)
            return original(self, *args, **kwargs)

        return call

    patches = Patches()
    patches.put(*method, around)
    return patches


def _record_call(method: Method, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    watched = _watched.get(id(module))
    if watched is not None and watched.method == method:
        for recorder in watched.recorders[:1]:  # Empty if the last optimizer is being collected.
            recorder.forward_began(args, kwargs)
        for recorder in watched.recorders:
            if recorder.waits_for_forward:
                recorder.replicas_ready()
