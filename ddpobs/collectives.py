"""Collectives that are not the reducer's: the user's own and SyncBatchNorm's, seen where training waits for them.

The methods of torch's process groups, of their works and of futures are wrapped for as long as telemetry runs, so that
it does not matter how a caller came by `all_reduce`. What blocks is the wait, and the wait alone is timed; NCCL gives
no work where nobody asked for one (`async_op=False`), and then the call is the wait, of the current stream. The reducer
calls the plain methods, and is not seen here.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from ddpobs.journal import Journal
from ddpobs.patching import Patches, plain

_ALL_REDUCE = plain(dist.ProcessGroup.allreduce)
_BROADCAST = plain(dist.ProcessGroup.broadcast)
_WAIT = plain(dist.Work.wait)
_VALUE = plain(torch._C.Future.wait)
_COLLECTIVES = (
    *("_allgather_base", "all_gather_single", "allgather", "allgather_coalesced"),
    *("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter", "reduce", "allreduce", "allreduce_coalesced"),
    *("all_to_all_single", "alltoall_base", "alltoall", "barrier", "broadcast", "gather", "scatter", "_end_coalescing"),
)
"""What `torch.distributed` calls; some of the names are not there in every version of torch."""
_REST_S = 0.1
_thread = threading.local()


def all_reduce(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], *options: Any) -> Any:
    """The group's own method, not noted; cheaper than torch.distributed's by more than a small bucket takes."""
    return _ALL_REDUCE(group, list(tensors), *options)


def broadcast_from_first(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], *options: Any) -> Any:
    """The same for a broadcast.

    It is not called as the method is: of a group that is written in Python pybind11 would take such a caller for the
    method itself, which asks for its parent's.
    """
    return _BROADCAST(group, list(tensors), *options)


def all_gather(group: dist.ProcessGroup, everyone: torch.Tensor, mine: torch.Tensor) -> Any:
    """Started, not waited for: the ranks' equally long tensors one after the other."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # The name until torch 2.12.
    return gather(everyone, mine, group=group, async_op=True)


def wait_for(work: Any) -> None:
    """The work's own wait, not noted; named so for the same reason."""
    _WAIT(work)


def value_of(future: Any) -> Any:
    """A future's value once it is there; the wait is not noted."""
    return _VALUE(future)


def name_of(group: dist.ProcessGroup) -> str:
    """What every rank calls the group; one that is written in Python does not know it itself."""
    return str(dist.distributed_c10d._get_process_group_name(group))


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """What moves the group's tensors on that device; nobody has to name it to torch, which then calls it undefined."""
    named = dist.get_backend(group)
    return named if named != "undefined" else str(group._get_backend(device).name())


def time_collectives(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Have the group's works know how long they took, which costs NCCL an event more each; whether they will."""
    if device.type != "cuda" or "nccl" not in backend_of(group, device):
        return False
    group._enable_collectives_timing()  # type: ignore[attr-defined]
    return True


def stay_in_interpreter() -> None:
    """Keep the interpreter's state of a process group's thread, which calls this from a completion's callback.

    Python knows nothing of such a thread: it makes it a state whenever it comes in, and drops it when it leaves, twice
    a callback. That took 0.1 ms of a step, where training wants the same core. What is kept goes with the process.
    """
    if not hasattr(_thread, "stays"):
        _thread.stays = True
        ctypes.pythonapi.PyGILState_Ensure()


class CollectiveHooks:
    """Tells the journal of each wait for a collective on the training thread, for as long as it is installed."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._patches = Patches()

    def install(self) -> None:
        """Put them in place."""
        self._patches.put(dist.Work, "wait", self._timed)
        # A work's future is of this class, and torch.futures.Future calls it.
        self._patches.put(torch._C.Future, "wait", self._timed)
        # Blocks by itself, without a work to wait for.
        self._patches.put(dist.ProcessGroup, "monitored_barrier", self._timed)
        # Functional collectives wait in C++, DTensor's and tensor parallelism's among them.
        self._patches.put(functional, "wait_tensor", self._timed_where_not_compiled)
        for name in _COLLECTIVES:
            if hasattr(dist.ProcessGroup, name):
                self._patches.put(dist.ProcessGroup, name, self._timed_without_work)

    def remove(self) -> None:
        """Take them out again."""
        self._patches.undo()

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        journal = self._journal

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = journal.blocking_began(torch._C._current_graph_task_id() >= 0)
            if began is None:
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                journal.blocking_ended(began)

        return timed

    def _timed_where_not_compiled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._timed(original)

        def wait(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if torch.compiler.is_compiling() else timed(*args, **kwargs)

        # `torch.compile` passes over what stands in ddpobs' files, which would break the user's graph here.
        wait.__code__ = wait.__code__.replace(co_filename=original.__code__.co_filename)
        return wait

    def _timed_without_work(self, original: Callable[..., Any]) -> Callable[..., Any]:
        journal = self._journal

        def timed(group: Any, *args: Any, **kwargs: Any) -> Any:
            began = journal.blocking_began(torch._C._current_graph_task_id() >= 0)
            if began is None:
                return original(group, *args, **kwargs)
            work: Any = original
            try:
                work = original(group, *args, **kwargs)
            finally:
                journal.blocking_ended(began if work is None else None)
            return work

        # Of a group that is written in Python pybind11 takes only a caller of that name for the method itself.
        timed.__code__ = timed.__code__.replace(co_name=original.__name__)
        return timed


@cache
def rest_at_exit() -> None:
    """Have the process rest for a moment before the interpreter ends; once is enough.

    A thread of the process group's drops a work after `wait` has returned: the callbacks of its future with it, and its
    tensors where Python let go of them meanwhile. Both want the interpreter, and where that is ending the process is
    aborted. Nobody tells when the thread is done.
    """
    atexit.register(time.sleep, _REST_S)
