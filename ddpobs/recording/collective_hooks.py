"""Collectives that are not the reducer's: the user's own and SyncBatchNorm's, seen where training waits for them.

The methods of torch's process groups, of their works and of futures are wrapped for as long as telemetry runs, so that
it does not matter how a caller came by `all_reduce`. What blocks is the wait, and the wait alone is timed; NCCL gives
no work where nobody asked for one (`async_op=False`), and then the call is the wait, of the current stream. The reducer
calls the plain methods, and is not seen here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from ddpobs.recording.journal import Journal
from ddpobs.torch_seam.patching import Patches

_COLLECTIVES = (
    *("_allgather_base", "all_gather_single", "allgather", "allgather_coalesced"),
    *("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter", "reduce", "allreduce", "allreduce_coalesced"),
    *("all_to_all_single", "alltoall_base", "alltoall", "barrier", "broadcast", "gather", "scatter", "_end_coalescing"),
)
"""What `torch.distributed` calls; some of the names are not there in every version of torch."""


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
            began = journal.collective_wait_began(torch._C._current_graph_task_id() >= 0)
            if began is None:
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                journal.collective_wait_ended(began)

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
            began = journal.collective_wait_began(torch._C._current_graph_task_id() >= 0)
            if began is None:
                return original(group, *args, **kwargs)
            work: Any = original
            try:
                work = original(group, *args, **kwargs)
            finally:
                journal.collective_wait_ended(began if work is None else None)
            return work

        # Of a group that is written in Python pybind11 takes only a caller of that name for the method itself.
        timed.__code__ = timed.__code__.replace(co_name=original.__name__)
        return timed
