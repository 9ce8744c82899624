"""Collectives and messages of torch's tensors, started on an MPI communicator.

MPI reads and writes contiguous memory. A tensor that is not contiguous travels as a copy, and results for several
tensors arrive in one flat tensor: `finish` copies both when the requests are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ddpobs.mpi.library import MPI
from ddpobs.mpi.messages import message, moved, name_of_reduction, reduction

Tensors = Sequence[torch.Tensor]


@dataclass
class Started:
    """Requests of MPI that have been started.

    Attributes:
        requests: All of them must complete.
        copies: Functions to call after that, in order.
        keep: Objects whose memory MPI uses meanwhile.
    """

    requests: list[MPI.Request] = field(default_factory=list)
    copies: list[Callable[[], Any]] = field(default_factory=list)
    keep: list[Any] = field(default_factory=list)

    def add(self, other: Started) -> None:
        """Add what another call has started."""
        self.requests += other.requests
        self.copies += other.copies
        self.keep += other.keep

    def finish(self) -> None:
        """Copy the results to the tensors of the caller."""
        for copy in self.copies:
            copy()


def all_reduce(comm: MPI.Intracomm, tensor: torch.Tensor, op: Any) -> Started:
    """Reduce a tensor over all ranks, in place."""
    if tensor.is_sparse:
        return _sparse_all_reduce(comm, tensor, op)
    flat, started = _own(tensor)
    kind = name_of_reduction(op)
    operation, datatype = reduction(kind, tensor.dtype)
    started.requests.append(comm.Iallreduce(MPI.IN_PLACE, message(flat, datatype), operation))
    _average(started, kind, flat, comm)
    return started


def _sparse_all_reduce(comm: MPI.Intracomm, tensor: torch.Tensor, op: Any) -> Started:
    """Reduce the dense values, and beside them the number of ranks that have each row.

    The rows of the result are those that any rank has, also if their values add up to zero.
    """
    depth = tensor.sparse_dim()
    mine = tensor.coalesce()
    present = torch.sparse_coo_tensor(
        mine.indices(), torch.ones(mine.values().shape[0], dtype=torch.int32), tensor.shape[:depth]
    ).to_dense()
    dense = mine.to_dense()
    started = all_reduce(comm, dense, op)
    started.requests.append(comm.Iallreduce(MPI.IN_PLACE, message(present, MPI.INT32_T), MPI.SUM))
    started.keep += [dense, present]

    def copy() -> None:
        indices = present.nonzero().t()
        values = dense[tuple(indices)]
        tensor.copy_(torch.sparse_coo_tensor(indices, values, tensor.shape, is_coalesced=True))

    started.copies.append(copy)
    return started


def broadcast(comm: MPI.Intracomm, tensor: torch.Tensor, root: int) -> Started:
    """Send the root's tensor to all ranks."""
    flat, started = _own(tensor)
    started.requests.append(comm.Ibcast(message(flat), root))
    return started


def reduce(comm: MPI.Intracomm, tensor: torch.Tensor, op: Any, root: int) -> Started:
    """Reduce to the root's tensor."""
    kind = name_of_reduction(op)
    operation, datatype = reduction(kind, tensor.dtype)
    if comm.rank != root:
        flat = _read(tensor)
        return Started([comm.Ireduce(message(flat, datatype), None, operation, root)], keep=[flat])
    flat, started = _own(tensor)
    started.requests.append(comm.Ireduce(MPI.IN_PLACE, message(flat, datatype), operation, root))
    _average(started, kind, flat, comm)
    return started


def all_gather(comm: MPI.Intracomm, outputs: Tensors, tensor: torch.Tensor) -> Started:
    """Gather all ranks' tensors into as many tensors, or into one that holds them all."""
    flat, (target, started) = _read(tensor), _own_all(outputs)
    started.requests.append(comm.Iallgather(message(flat), message(target, ranks=comm.size)))
    started.keep.append(flat)
    return started


def gather(comm: MPI.Intracomm, outputs: Tensors, tensor: torch.Tensor, root: int) -> Started:
    """Gather all ranks' tensors on the root; the others' `outputs` are empty."""
    flat = _read(tensor)
    if comm.rank != root:
        return Started([comm.Igather(message(flat), None, root)], keep=[flat])
    target, started = _own_all(outputs)
    started.requests.append(comm.Igather(message(flat), message(target, ranks=comm.size), root))
    started.keep.append(flat)
    return started


def scatter(comm: MPI.Intracomm, output: torch.Tensor, inputs: Tensors, root: int) -> Started:
    """Send one of the root's tensors to each rank; the others' `inputs` are empty."""
    flat, started = _own(output)
    source = _read_all(inputs) if comm.rank == root else None
    parts = None if source is None else message(source, ranks=comm.size)
    started.requests.append(comm.Iscatter(parts, message(flat), root))
    started.keep.append(source)
    return started


def reduce_scatter(comm: MPI.Intracomm, output: torch.Tensor, inputs: Tensors, op: Any) -> Started:
    """Reduce a tensor for each rank, or one that holds them all; each rank gets its own."""
    source, (flat, started) = _read_all(inputs), _own(output)
    kind = name_of_reduction(op)
    operation, datatype = reduction(kind, output.dtype)
    counts = [tensor.numel() for tensor in inputs] if len(inputs) == comm.size else [output.numel()] * comm.size
    to = message(flat, datatype)
    started.requests.append(comm.Ireduce_scatter(message(source, datatype), to, counts, operation))
    started.keep.append(source)
    _average(started, kind, flat, comm)
    return started


def all_to_all(comm: MPI.Intracomm, outputs: Tensors, inputs: Tensors) -> Started:
    """Send one tensor to each rank, and receive one from each; their lengths may differ."""
    source, (target, started) = _read_all(inputs), _own_all(outputs)
    sent, received = ([tensor.numel() for tensor in tensors] for tensors in (inputs, outputs))
    started.requests.append(comm.Ialltoallv(_parts(source, sent), _parts(target, received)))
    started.keep.append(source)
    return started


def send(comm: MPI.Intracomm, tensor: torch.Tensor, rank: int, tag: int) -> Started:
    """Send a tensor to one rank."""
    flat = _read(tensor)
    return Started([comm.Isend(message(flat), rank, tag)], keep=[flat])


def receive(comm: MPI.Intracomm, tensor: torch.Tensor, rank: int, tag: int) -> Started:
    """Receive a tensor from one rank, or from any (`MPI.ANY_SOURCE`)."""
    flat, started = _own(tensor)
    started.requests.append(comm.Irecv(message(flat), rank, tag))
    return started


def _read(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values in contiguous memory."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _own(tensor: torch.Tensor) -> tuple[torch.Tensor, Started]:
    """Contiguous memory with the tensor's values, which come back to the tensor at the end."""
    flat = _read(tensor)
    if flat.data_ptr() == tensor.data_ptr():
        return flat, Started(keep=[flat])
    return flat, Started(copies=[lambda: tensor.copy_(flat)], keep=[flat])


def _read_all(tensors: Tensors) -> torch.Tensor:
    return _read(tensors[0]) if len(tensors) == 1 else torch.cat([_read(tensor).reshape(-1) for tensor in tensors])


def _own_all(tensors: Tensors) -> tuple[torch.Tensor, Started]:
    """As `_own`, for tensors whose values lie behind each other."""
    if len(tensors) == 1:
        return _own(tensors[0])
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype)

    def copy() -> None:
        for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(values.view(tensor.shape))

    return flat, Started(copies=[copy], keep=[flat])


def _parts(flat: torch.Tensor, counts: list[int]) -> list[Any]:
    return [message(flat)[0], counts, moved(flat)]


def _average(started: Started, kind: str, flat: torch.Tensor, comm: MPI.Intracomm) -> None:
    if kind == "AVG":
        started.copies.insert(0, lambda: flat.div_(comm.size))
