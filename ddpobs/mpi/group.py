"""The process group: torch's collectives over an MPI communicator.

Operations of a communicator meet the other ranks' in the order of torch's calls, and complete in any order.
"""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from ddpobs.errors import MpiError
from ddpobs.mpi import operations
from ddpobs.mpi.progress import Operation, Stages, progress
from ddpobs.mpi.runtime import library
from ddpobs.mpi.work import MpiWork, all_of

BACKEND = "ddpobs_mpi"
_keys = itertools.count()


@dataclass(frozen=True)
class _Options:
    """Options of the backend, with the names of those of torch's backends."""

    backend: str
    _timeout: timedelta


class MpiGroup(dist.ProcessGroup):
    """A process group over a communicator of its own.

    Args:
        communicator: Communicator of the group's ranks, in the group's order; the group frees it.
        timeout: Time after which an operation fails, if the call names none.
    """

    supports_coalescing = False
    supports_splitting = False

    def __init__(self, communicator: Any, timeout: timedelta) -> None:
        super().__init__(communicator.Get_rank(), communicator.Get_size())  # type: ignore[call-arg]
        self._communicator = communicator
        self._later_stages = communicator.Dup()
        self._timeout = timeout
        self._key = next(_keys)
        self._numbers = itertools.count()
        self._group_name = ""
        self._coalesced: list[MpiWork] | None = None

    @classmethod
    def create(cls, options: Any, _: Any = None) -> MpiGroup:
        """Create the group for torch; its ranks call this together.

        Raises:
            MpiError: MPI's launcher started another number of ranks, or placed this rank elsewhere.
        """
        world = library().COMM_WORLD
        members = list(options.global_ranks_in_group)
        if members:
            tag = zlib.crc32(options.group_id.encode()) % 32768  # Every MPI allows these tags.
            return cls(world.Create_group(world.Get_group().Incl(members), tag), options.timeout)
        if (options.group_rank, options.group_size) != (world.Get_rank(), world.Get_size()):
            raise MpiError(
                f"torch has rank {options.group_rank} of {options.group_size}, MPI has rank {world.Get_rank()} of "
                f"{world.Get_size()}: start the ranks with mpiexec, and leave rank, size and address to MPI"
            )
        return cls(world.Dup(), options.timeout)

    @override
    def allreduce(self, tensors: Any, opts: Any = None) -> MpiWork:
        opts = opts or dist.AllreduceOptions()
        if tensors[0].is_sparse:
            stages = operations.all_reduce_sparse(self._communicator, self._later_stages, tensors)
            return self._start("all_reduce", stages, tensors, opts, staged=True)
        return self._start(
            "all_reduce", operations.all_reduce(self._communicator, tensors, opts.reduceOp), tensors, opts
        )

    @override
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> MpiWork:
        opts = opts or dist.AllreduceCoalescedOptions()
        stages = operations.all_reduce(self._communicator, tensors, opts.reduceOp)
        return self._start("all_reduce_coalesced", stages, tensors, opts)

    @override
    def reduce(self, tensors: Any, opts: Any) -> MpiWork:
        stages = operations.reduce(self._communicator, tensors, opts.reduceOp, opts.rootRank)
        return self._start("reduce", stages, tensors, opts)

    @override
    def broadcast(self, tensors: Any, opts: Any = None) -> MpiWork:
        opts = opts or dist.BroadcastOptions()
        return self._start(
            "broadcast", operations.broadcast(self._communicator, tensors, opts.rootRank), tensors, opts
        )

    @override
    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> MpiWork:
        pairs = list(zip(output_tensors, input_tensors, strict=True))
        return self._start("all_gather", operations.all_gather(self._communicator, pairs), output_tensors, opts)

    @override
    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> MpiWork:
        stages = operations.all_gather(self._communicator, [([output], input)])
        return self._start("all_gather_into_tensor", stages, [output], opts)

    @override
    def all_gather_single_coalesced(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> MpiWork:
        pairs = [([output], own) for output, own in zip(output_tensors, input_tensors, strict=True)]
        stages = operations.all_gather(self._communicator, pairs)
        return self._start("all_gather_into_tensor_coalesced", stages, output_tensors, opts)

    @override
    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> MpiWork:
        pairs = list(zip(zip(*output_lists, strict=True), input_list, strict=True))
        stages = operations.all_gather(self._communicator, pairs)
        return self._start("all_gather_coalesced", stages, output_lists, opts)

    @override
    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> MpiWork:
        opts = opts or dist.ReduceScatterOptions()
        pairs = list(zip(output_tensors, input_tensors, strict=True))
        stages = operations.reduce_scatter(self._communicator, pairs, opts.reduceOp)
        return self._start("reduce_scatter", stages, output_tensors, opts)

    @override
    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> MpiWork:
        opts = opts or dist.ReduceScatterOptions()
        stages = operations.reduce_scatter(self._communicator, [(output, [input])], opts.reduceOp)
        return self._start("reduce_scatter_tensor", stages, [output], opts)

    @override
    def reduce_scatter_single_coalesced(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> MpiWork:
        opts = opts or dist.ReduceScatterOptions()
        pairs = [(output, [own]) for output, own in zip(output_tensors, input_tensors, strict=True)]
        stages = operations.reduce_scatter(self._communicator, pairs, opts.reduceOp)
        return self._start("reduce_scatter_tensor_coalesced", stages, output_tensors, opts)

    @override
    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> MpiWork:
        opts = opts or dist.GatherOptions()
        gathered = output_tensors[0] if output_tensors else []
        stages = operations.gather(self._communicator, gathered, input_tensors[0], opts.rootRank)
        return self._start("gather", stages, output_tensors, opts)

    @override
    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> MpiWork:
        opts = opts or dist.ScatterOptions()
        parts = input_tensors[0] if input_tensors else []
        stages = operations.scatter(self._communicator, output_tensors[0], parts, opts.rootRank)
        return self._start("scatter", stages, output_tensors, opts)

    @override
    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> MpiWork:
        stages = operations.all_to_all(self._communicator, output_tensors, input_tensors)
        return self._start("all_to_all", stages, output_tensors, opts)

    @override
    def all_to_all_single(  # noqa: PLR0917 - torch's
        self, output: Any, input: Any, output_split_sizes: Any, input_split_sizes: Any, opts: Any = None
    ) -> MpiWork:
        rows = list(output_split_sizes), list(input_split_sizes)
        stages = operations.split_all_to_all(self._communicator, output, input, *rows)
        return self._start("all_to_all_single", stages, [output], opts)

    @override
    def barrier(self, opts: Any = None) -> MpiWork:
        return self._start("barrier", operations.barrier(self._communicator), [], opts)

    @override
    def send(self, tensors: Any, dst: int, tag: int) -> MpiWork:
        return self._start(f"send to {dst}", operations.send(self._communicator, tensors, dst, tag), tensors)

    @override
    def recv(self, tensors: Any, src: int, tag: int) -> MpiWork:
        return self._start(f"recv from {src}", operations.receive(self._communicator, tensors, src, tag), tensors)

    @override
    def recv_anysource(self, tensors: Any, tag: int) -> MpiWork:
        return self._start("recv", operations.receive(self._communicator, tensors, None, tag), tensors)

    # Torch's older names.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _start(  # noqa: PLR0917 - one call a collective
        self, name: str, stages: Stages, value: Any, opts: Any = None, staged: bool = False
    ) -> MpiWork:
        requests = next(stages)
        timeout = getattr(opts, "timeout", None)
        timeout = timeout if timeout is not None and timeout > timedelta(0) else self._timeout
        work = MpiWork(f"{BACKEND}: {name} {next(self._numbers)} of group {self._group_name}", list(value))
        progress.add(Operation(work, stages, requests, timeout.total_seconds(), self._key, staged))
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    @override
    def _start_coalescing(self, device: Any) -> None:
        self._coalesced = []

    @override
    def _end_coalescing(self, device: Any) -> MpiWork:
        works, self._coalesced = self._coalesced or [], None
        return all_of(works)

    @override
    def getBackendName(self) -> str:
        return BACKEND

    @override
    def name(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        """The group's name, the same on every rank."""
        return self._group_name

    @override
    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    @override
    def _get_backend(self, device: torch.device) -> MpiGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {torch.device(device).type}")
        return self

    @property
    def options(self) -> _Options:
        """The backend's options, as torch's own backends have them."""
        return _Options(BACKEND, self._timeout)

    @override
    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @override
    def abort(self) -> None:
        progress.abort(self._key)

    @override
    def shutdown(self) -> None:
        """Free the communicators, unless an operation still uses them."""
        if self._communicator and not progress.holds(self._key):
            self._communicator.Free()
            self._later_stages.Free()
