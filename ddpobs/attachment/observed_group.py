"""A process group for torch's own reducer that reports each collective to an observer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from typing_extensions import override

from ddpobs.torch_seam import autograd
from ddpobs.torch_seam.collectives import all_reduce, broadcast_from_first, wait_for


class Observer(Protocol):
    """Receives the collectives of torch's reducer.

    Attributes:
        now: Takes a time stamp; 0 while a CUDA graph is captured.
    """

    now: Callable[[], Any]

    def reduced(self, tensor: torch.Tensor, launched: Any, work: dist.Work) -> None:
        """Record an all-reduce that was launched at that stamp."""
        ...

    def broadcast(self, tensor: torch.Tensor, launched: Any) -> None:
        """Record a broadcast that was launched at that stamp and has ended with this result."""
        ...


class ObservedGroup(dist.ProcessGroup):
    """A process group that forwards every call of torch's reducer to another group, and reports it.

    Args:
        inner: The real group.
        observer: Receives the collectives. The group holds a weak reference, and reports nothing once it is dead.
    """

    def __init__(self, inner: dist.ProcessGroup, observer: Observer) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self._inner = inner
        self._observer: Callable[[], Observer | None] = weakref.ref(observer)

    def ignore(self) -> None:
        """Report no further collectives."""
        self._observer = lambda: None

    @override
    def allreduce(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        """Reduce a bucket, or the map of unused parameters."""
        observer = self._observer()
        autograd.leave_context()
        launched = observer.now() if observer is not None else 0
        work = all_reduce(self._inner, tensors, *([] if options is None else [options]))
        # During the capture of a CUDA graph there are no stamps, and callbacks on other streams are not allowed.
        if observer is not None and launched:
            observer.reduced(tensors[0], launched, work)
        return work

    @override
    def broadcast(self, tensors: Any, options: Any) -> Any:  # type: ignore[override]
        """Broadcast rank 0's new order of parameters, and the number of parameters in each bucket."""
        observer = self._observer()
        launched = observer.now() if observer is not None else 0
        work = broadcast_from_first(self._inner, tensors, options)
        if observer is not None:
            wait_for(work)  # The reducer waits next in any case.
            observer.broadcast(tensors[0], launched)
        return work

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The real group's backend."""
        return dist.get_backend(self._inner)
