"""A process group for torch's own reducer that tells what passes through it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ddpobs.torch_seam import autograd
from ddpobs.torch_seam.collectives import all_reduce, broadcast_from_first, wait_for


class Observer(Protocol):
    """Who is told."""

    now: Callable[[], Any]

    def reduced(self, tensor: torch.Tensor, launched: Any, work: dist.Work) -> None:
        """An all-reduce was launched at that stamp."""
        ...

    def broadcast(self, tensor: torch.Tensor, launched: Any) -> None:
        """A broadcast that was launched at that stamp has ended with this result."""
        ...


class ObservedGroup(dist.ProcessGroup):
    """A process group that hands everything that torch's reducer asks for on to another one, and notes it.

    Args:
        inner: The real group.
        observer: Told of what passes; nobody is once it is gone.
    """

    def __init__(self, inner: dist.ProcessGroup, observer: Observer) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self._inner = inner
        self._told: Callable[[], Observer | None] = weakref.ref(observer)

    def ignore(self) -> None:
        """Note nothing more."""
        self._told = lambda: None

    def allreduce(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        """A bucket, or the map of unused parameters."""
        told = self._told()
        autograd.leave_context()
        launched = told.now() if told is not None else 0
        work = all_reduce(self._inner, tensors, *([] if options is None else [options]))
        if told is not None and launched:  # No stamps while a CUDA graph is captured, nor callbacks, on other streams.
            told.reduced(tensors[0], launched, work)
        return work

    def broadcast(self, tensors: Any, options: Any) -> Any:  # type: ignore[override]
        """Rank 0's new order of parameters, and how many each bucket has."""
        told = self._told()
        launched = told.now() if told is not None else 0
        work = broadcast_from_first(self._inner, tensors, options)
        if told is not None:
            wait_for(work)  # As the reducer does next.
            told.broadcast(tensors[0], launched)
        return work

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The real group's."""
        return dist.get_backend(self._inner)
