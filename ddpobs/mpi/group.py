"""The process group that torch calls: torch's signatures, over `collectives`."""

# mypy: disable-error-code="override, assignment"
# Torch's stubs overload each method; a group in Python has the form with lists of tensors and options.

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from typing_extensions import override

from ddpobs.errors import MpiError
from ddpobs.mpi import collectives
from ddpobs.mpi.blocking import logged_if_long
from ddpobs.mpi.collectives import Started
from ddpobs.mpi.library import MPI
from ddpobs.mpi.messages import check
from ddpobs.mpi.options import Options, listed, nested, options_of
from ddpobs.mpi.works import MpiWork, progress
from ddpobs.torch_seam.collectives import register_python_group

BACKEND = "ddpobs_mpi"
"""The backend's name in `torch.distributed`."""


def register() -> None:
    """Register the backend with torch."""
    dist.Backend.register_backend(BACKEND, MpiGroup, devices=["cpu"])
    register_python_group(MpiGroup, MpiWork)


class MpiGroup(dist.ProcessGroup):
    """A process group over an MPI communicator of its own.

    Args:
        store: Shared by the group's ranks, which find each other's MPI ranks in it.
        rank: This rank's index in the group.
        size: Number of ranks of the group.
        timeout: Of its collectives.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.timeout = timeout
        self._error: Exception | None = None
        self._comm = _create_communicator(store, rank, size)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The backend's name."""
        return BACKEND

    # Torch keeps both in the group's backends, which a group in Python does not have.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        """The name that torch gave the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The description that torch gave the group."""
        return self._description

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the timeout of collectives that start from now on."""
        self.timeout = timeout

    @override
    def shutdown(self) -> None:
        """Free the communicator; every rank of the group must call this."""
        comm, self._comm = self._comm, MPI.COMM_NULL
        if comm != MPI.COMM_NULL and self._error is None:
            with logged_if_long("MPI_Comm_free"):
                comm.Free()

    def abort(self) -> None:
        """Refuse further collectives; the communicator stays."""
        self._error = self._error or dist.DistBackendError("the process group was aborted")

    @override
    def allreduce(self, tensors: Any, *options: Any, **named: Any) -> Any:
        chosen = options_of(options, named)
        start = lambda tensor: collectives.all_reduce(self._comm, tensor, chosen.op)  # noqa: E731
        return self._each("all_reduce", tensors, chosen, start)

    @override
    def allreduce_coalesced(self, tensors: Any, *options: Any, **named: Any) -> Any:
        return self.allreduce(tensors, *options, **named)

    @override
    def broadcast(self, tensors: Any, *options: Any, **named: Any) -> Any:
        chosen = options_of(options, named)
        start = lambda tensor: collectives.broadcast(self._comm, tensor, chosen.root)  # noqa: E731
        return self._each("broadcast", tensors, chosen, start)

    @override
    def reduce(self, tensors: Any, *options: Any, **named: Any) -> Any:
        chosen = options_of(options, named)
        start = lambda tensor: collectives.reduce(self._comm, tensor, chosen.op, chosen.root)  # noqa: E731
        return self._each("reduce", tensors, chosen, start)

    @override
    def allgather(self, output_lists: Any, inputs: Any, *options: Any, **named: Any) -> Any:
        output_lists, inputs = nested(output_lists), listed(inputs)
        outputs = [tensor for tensors in output_lists for tensor in tensors]
        start = [partial(collectives.all_gather, self._comm, *pair) for pair in zip(output_lists, inputs, strict=True)]
        return self._start("all_gather", [*outputs, *inputs], outputs, options_of(options, named), start)

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> Any:
        """As torch's: `output_lists` has a list of all tensors for each rank."""
        return self.allgather([list(outputs) for outputs in zip(*output_lists, strict=True)], inputs, opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """As torch's."""
        return self.allgather([[output] for output in outputs], inputs, opts)

    def all_gather_single(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        """As torch's."""
        return self.allgather([[output]], [tensor], opts)

    @override
    def reduce_scatter(self, outputs: Any, input_lists: Any, *options: Any, **named: Any) -> Any:
        chosen, outputs, input_lists = options_of(options, named), listed(outputs), nested(input_lists)
        pairs = zip(outputs, input_lists, strict=True)
        start = [partial(collectives.reduce_scatter, self._comm, *pair, chosen.op) for pair in pairs]
        inputs = [tensor for tensors in input_lists for tensor in tensors]
        return self._start("reduce_scatter", [*outputs, *inputs], outputs, chosen, start)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """As torch's."""
        return self.reduce_scatter(outputs, [[tensor] for tensor in inputs], opts)

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        """As torch's."""
        return self.reduce_scatter([output], [[tensor]], opts)

    @override
    def gather(self, output_lists: Any, inputs: Any, *options: Any, **named: Any) -> Any:
        chosen, lists, inputs = options_of(options, named), nested(output_lists), listed(inputs)
        outputs = lists[0] if lists else []
        start = [partial(collectives.gather, self._comm, outputs, inputs[0], chosen.root)]
        return self._start("gather", [*outputs, *inputs], outputs, chosen, start)

    @override
    def scatter(self, outputs: Any, input_lists: Any, *options: Any, **named: Any) -> Any:
        chosen, outputs, lists = options_of(options, named), listed(outputs), nested(input_lists)
        inputs = lists[0] if lists else []
        start = [partial(collectives.scatter, self._comm, outputs[0], inputs, chosen.root)]
        return self._start("scatter", [*outputs, *inputs], outputs, chosen, start)

    @override
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        start = [partial(collectives.all_to_all, self._comm, outputs, inputs)]
        return self._start("all_to_all", [*outputs, *inputs], outputs, options_of([opts], {}), start)

    def all_to_all_single(self, output: Any, tensor: Any, output_rows: Any, input_rows: Any, opts: Any = None) -> Any:
        """As torch's; without numbers of rows, every rank gets as many."""
        outputs, inputs = _split(output, output_rows, self.size()), _split(tensor, input_rows, self.size())
        start = [partial(collectives.all_to_all, self._comm, outputs, inputs)]
        return self._start("all_to_all", [output, tensor], [output], options_of([opts], {}), start)

    @override
    def barrier(self, *options: Any, **named: Any) -> Any:
        return self._start("barrier", [], [], options_of(options, named), [lambda: Started([self._comm.Ibarrier()])])

    @override
    def send(self, tensors: Any, rank: int, tag: int) -> Any:
        return self._each("send", tensors, Options(), lambda tensor: collectives.send(self._comm, tensor, rank, tag))

    @override
    def recv(self, tensors: Any, rank: int, tag: int) -> Any:
        return self._each("recv", tensors, Options(), lambda tensor: collectives.receive(self._comm, tensor, rank, tag))

    @override
    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _each(self, name: str, tensors: Any, options: Options, start: Callable[[torch.Tensor], Started]) -> MpiWork:
        tensors = listed(tensors)
        return self._start(name, tensors, tensors, options, [partial(start, tensor) for tensor in tensors])

    def _start(
        self, name: str, checked: Any, result: Any, options: Options, starts: Sequence[Callable[[], Started]]
    ) -> MpiWork:
        """Start requests as one work."""
        if self._error is not None:
            raise dist.DistBackendError(f"this process group cannot go on after an error: {self._error}")
        check(checked, sparse=name == "all_reduce")
        together = Started()
        try:
            for start in starts:
                together.add(start())
        except MPI.Exception as error:
            raise dist.DistBackendError(f"{name} over MPI failed: {error}") from error
        work = MpiWork(
            name,
            together.requests,
            list(result),
            options.timeout if options.timeout > timedelta(0) else self.timeout,
            together.finish if together.copies else None,
            together.keep,
            self._failed,
        )
        return progress.add(work)

    def _failed(self, error: Exception) -> None:
        self._error = error


def _split(tensor: torch.Tensor, rows: list[int], size: int) -> list[torch.Tensor]:
    if not rows and tensor.shape[0] % size:
        raise ValueError(
            f"all_to_all_single: the first of the dimensions {list(tensor.shape)} is no multiple of {size}"
        )
    return list(tensor.split(list(rows) or [tensor.shape[0] // size] * size))


def _create_communicator(store: Store, rank: int, size: int) -> MPI.Intracomm:
    """Create the communicator of the ranks that share the store, in their order."""
    world = MPI.COMM_WORLD
    store.set(f"mpi_rank/{rank}", str(world.rank))
    world_ranks = [int(value) for value in store.multi_get([f"mpi_rank/{index}" for index in range(size)])]
    if len(set(world_ranks)) < size:
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "another launcher"
        raise MpiError(
            f"{size} ranks were started by {launcher}, and MPI has {world.size}: start them with "
            f"`mpiexec -n {size} python …`"
        )
    group = world.group.Incl(world_ranks)
    try:
        with logged_if_long("MPI_Comm_create_group"):
            return world.Create_group(group)
    finally:
        group.Free()
