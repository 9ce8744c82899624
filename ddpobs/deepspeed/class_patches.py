"""Patches of DeepSpeed's classes that report to an engine's attachment, if it has one. The engines stay unchanged."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ddpobs.torch_seam.patching import Patches
from ddpobs.wire import UNIT_KINDS

ENGINE_MODULE = "deepspeed.runtime.engine"
"""Module of `DeepSpeedEngine`."""
_GATHER, _, _SCATTER, _REDUCE, _, _REDUCE_TO_ONE, _BROADCAST, _ALL_TO_ALL = UNIT_KINDS
_COLLECTIVES = {
    "all_gather": _GATHER,
    "all_gather_base": _GATHER,
    "all_gather_coalesced": _GATHER,
    "all_gather_into_tensor": _GATHER,
    "all_reduce": _REDUCE,
    "all_reduce_coalesced": _REDUCE,
    "all_to_all": _ALL_TO_ALL,
    "all_to_all_single": _ALL_TO_ALL,
    "broadcast": _BROADCAST,
    "reduce": _REDUCE_TO_ONE,
    "reduce_scatter": _SCATTER,
    "reduce_scatter_tensor": _SCATTER,
}
"""Kinds of the methods of DeepSpeed's backend; not every version has all of them."""
_HANDLES = ("AllGatherHandle", "AllGatherCoalescedHandle", "AllReduceCoalescedHandle")
"""Classes that ZeRO-3 builds of a work and its parameters; not every version has all of them."""


class Attached(Protocol):
    """Receives the calls of one engine."""

    def forward(self, inputs: tuple[Any, ...], named: dict[str, Any], call: Callable[[], Any]) -> Any:
        """Call the engine's forward."""
        ...

    def backward_began(self) -> None:
        """Record that the engine's backward begins."""
        ...

    def reduce(self, call: Callable[[], Any]) -> Any:
        """Call the end of the engine's backward, which may reduce gradients."""
        ...

    def step(self, call: Callable[[], Any]) -> Any:
        """Call the step of the engine's optimizer."""
        ...

    @property
    def takes_collectives(self) -> bool:
        """Whether a collective that is launched now is the engine's."""
        ...

    def communicate(self, kind: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        """Call a collective."""
        ...

    def name(self, work: Any, parameters: list[Any]) -> None:
        """Record which parameters a collective gathers."""
        ...


class EnginePatches:
    """Wraps methods of DeepSpeed's engine, backend and handles, while installed.

    Args:
        attachments: Attachments by engine.
    """

    def __init__(self, attachments: Mapping[Any, Attached]) -> None:
        self._attachments = attachments
        self._latest: Callable[[], Any] = lambda: None
        """Engine whose forward, backward or step began last: a collective does not name its engine."""
        self._patches = Patches()

    def install(self) -> None:
        """Wrap the methods."""
        self.remove()  # They are still wrapped if the last attached engines were garbage-collected.
        engine = sys.modules[ENGINE_MODULE].DeepSpeedEngine
        for name, report in (
            ("forward", lambda attachment, args, named, call: attachment.forward(args, named, call)),
            ("_backward_prologue", _begin_backward),
            ("_backward_epilogue", lambda attachment, _args, _named, call: attachment.reduce(call)),
            ("_take_model_step", lambda attachment, _args, _named, call: attachment.step(call)),
        ):
            self._patches.put(engine, name, self._through(report))
        backend = sys.modules["deepspeed.comm.torch"].TorchBackend
        for name, kind in _COLLECTIVES.items():
            if hasattr(backend, name):
                self._patches.put(backend, name, self._stamped(kind))
        handles = sys.modules["deepspeed.runtime.zero.partition_parameters"]
        for name in _HANDLES:
            if hasattr(handles, name):
                self._patches.put(getattr(handles, name), "__init__", self._named)

    def remove(self) -> None:
        """Restore the methods."""
        self._patches.undo()

    def _through(self, report: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(engine: Any, *args: Any, **kwargs: Any) -> Any:
                attachment = self._attachments.get(engine)
                if attachment is None:
                    return original(engine, *args, **kwargs)
                self._latest = weakref.ref(engine)
                return report(attachment, args, kwargs, lambda: original(engine, *args, **kwargs))

            return call

        return around

    def _stamped(self, kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(backend: Any, *args: Any, **kwargs: Any) -> Any:
                attachment = self._current()
                if attachment is None or not attachment.takes_collectives:
                    return original(backend, *args, **kwargs)
                arguments = (*args, *kwargs.values())
                return attachment.communicate(kind, arguments, lambda: original(backend, *args, **kwargs))

            return call

        return around

    def _named(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(handle: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(handle, *args, **kwargs)
            attachment = self._current()
            if attachment is not None:
                work, parameters, *_ = (*args, *kwargs.values())
                attachment.name(work, parameters if isinstance(parameters, list) else [parameters])

        return __init__

    def _current(self) -> Attached | None:
        engine = self._latest()
        return None if engine is None else self._attachments.get(engine)


def _begin_backward(attachment: Attached, _args: Any, _named: Any, call: Callable[[], Any]) -> Any:
    attachment.backward_began()
    return call()
