"""Hooks on collectives outside of the reducer, the user's and SyncBatchNorm's, at the point where training waits.

The methods of torch's process groups, of their works and of futures are wrapped while telemetry runs. So every path
to `all_reduce` is covered. Only the wait blocks, and only the wait is timed. NCCL returns no work with
`async_op=False`; then the call itself is the wait, of the current stream. The reducer calls the unwrapped methods, and
is not timed here. A wait at the rendezvous store is marked, so that a pulse can name it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import _functional_collectives as functional

from ddpobs.observers import UNRECORDED
from ddpobs.recording.journal import Journal
from ddpobs.torch_seam.collectives import python_groups
from ddpobs.torch_seam.modes import unseen
from ddpobs.torch_seam.patching import Patches

_ALL_REDUCES = ("allreduce", "allreduce_coalesced")
_COLLECTIVES = (
    *("_allgather_base", "all_gather_single", "allgather", "allgather_coalesced"),
    *("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter", "reduce", "allreduce", "allreduce_coalesced"),
    *("all_to_all_single", "alltoall_base", "alltoall", "barrier", "broadcast", "gather", "scatter", "_end_coalescing"),
)
"""Methods that `torch.distributed` calls; not every version of torch has all of them."""
_PUBLIC_NAMES = {
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "alltoall_base": "all_to_all_single",
    "alltoall": "all_to_all",
}
"""Functions of `torch.distributed` by method, where the names differ."""
_STORE_CALLS = ("get", "wait", "multi_get")
"""Calls of a rendezvous store that wait for a key."""


class CollectiveHooks:
    """Report each wait for a collective on the training thread to the journal, while installed."""

    def __init__(self, journal: Journal) -> None:
        self._waits = journal.waits
        self._patches = Patches()

    def install(self) -> None:
        """Install the hooks."""
        self._patches.put(dist.Work, "wait", self._timed)
        # The class of a work's future; torch.futures.Future calls it.
        self._patches.put(torch._C.Future, "wait", self._timed)
        # Blocks inside the call; there is no work to wait for.
        self._patches.put(dist.ProcessGroup, "monitored_barrier", self._timed_barrier)
        # Functional collectives (DTensor, tensor parallelism) wait in C++.
        self._patches.put(functional, "wait_tensor", self._timed_outside_compile)
        for name in _COLLECTIVES:
            if hasattr(dist.ProcessGroup, name):
                self._patches.put(dist.ProcessGroup, name, self._timed_without_work)
        for group, work in python_groups:
            for name in _COLLECTIVES:
                if name in vars(group):
                    self._patches.put(group, name, self._timed_of_python)
            self._patches.put(work, "wait", self._timed_if_recorded)
        for name in _STORE_CALLS:
            self._patches.put(Store, name, self._marked)

    def remove(self) -> None:
        """Remove the hooks."""
        self._patches.undo()

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        waits, elsewhere = self._waits, self._marked_elsewhere(original)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if waits.own is UNRECORDED:
                return original(*args, **kwargs)
            began = waits.collective_wait_began(torch._C._current_graph_task_id() >= 0, args[0])
            if began is None:
                return elsewhere(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                waits.collective_wait_ended(began)

        return timed

    def _marked_elsewhere(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Mark the wait of another thread than training's, which is not timed."""
        waits = self._waits

        def marked(*args: Any, **kwargs: Any) -> Any:
            if not waits.began_elsewhere():
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                waits.ended_elsewhere()

        return marked

    def _timed_of_python(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Record a call of `torch.distributed`; torch's reducer, in C++, calls the same method."""
        record = self._timed_without_work(original)

        def timed(group: Any, *args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_globals.get("__name__") != dist.distributed_c10d.__name__:
                return original(group, *args, **kwargs)
            work = record(group, *args, **kwargs)
            work.recorded = True
            return work

        return timed

    def _timed_if_recorded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._timed(original)

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            return (timed if work.recorded else original)(work, *args, **kwargs)

        return wait

    def _timed_barrier(self, original: Callable[..., Any]) -> Callable[..., Any]:
        waits, timed = self._waits, self._timed(original)

        def monitored_barrier(*args: Any, **kwargs: Any) -> Any:
            waits.collective_began("monitored_barrier", args[0])
            return timed(*args, **kwargs)

        return monitored_barrier

    def _marked(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Mark the wait at a store; it is no communication of the step, and is not timed."""
        waits, name = self._waits, f"store.{original.__name__}"

        def marked(*args: Any, **kwargs: Any) -> Any:
            if not waits.store_wait_began(name):
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                waits.store_wait_ended()

        # If a store is written in Python, pybind11 detects a call from the override by the caller's function name.
        marked.__code__ = marked.__code__.replace(co_name=original.__name__)
        return marked

    def _timed_outside_compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._timed(original)

        def wait(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            self._waits.collective_elements += _elements(args)
            return timed(*args, **kwargs)

        # `torch.compile` skips functions from ddpobs' files; that would break the user's graph here.
        wait.__code__ = wait.__code__.replace(co_filename=original.__code__.co_filename)
        return wait

    def _timed_without_work(self, original: Callable[..., Any]) -> Callable[..., Any]:
        waits, name = self._waits, _PUBLIC_NAMES.get(original.__name__, original.__name__)
        reduces = original.__name__ in _ALL_REDUCES

        def timed(group: Any, *args: Any, **kwargs: Any) -> Any:
            if waits.own is UNRECORDED:
                return original(group, *args, **kwargs)
            waits.collective_began(name, group)
            elements = _elements(args) if waits.own is None else 0  # Those of a door's own are not the user's.
            waits.collective_elements += elements
            if reduces and group.size() == dist.get_world_size():
                waits.reduced_elements += elements
            began = waits.collective_wait_began(torch._C._current_graph_task_id() >= 0)
            if began is None:
                return original(group, *args, **kwargs)
            work: Any = original
            try:
                work = original(group, *args, **kwargs)
            finally:
                waits.collective_wait_ended(began if work is None else None)
            return work

        # If a group is written in Python, pybind11 detects a call from the override by the caller's function name.
        timed.__code__ = timed.__code__.replace(co_name=original.__name__)
        return timed


@unseen
def _elements(value: Any) -> int:
    """Elements of the tensors among a collective's arguments."""
    if isinstance(value, torch.Tensor):
        return value.numel()
    return sum(map(_elements, value)) if isinstance(value, (list, tuple)) else 0
