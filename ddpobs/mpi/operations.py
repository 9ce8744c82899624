"""Torch's collectives as stages of MPI's nonblocking operations.

Each function is a generator that starts requests, yields them, and goes on when they are complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ddpobs.mpi.buffers import averages, elements, memory, operator
from ddpobs.mpi.progress import Stages
from ddpobs.mpi.runtime import library
from ddpobs.mpi.staging import flat, landing

Tensors = Sequence[torch.Tensor]


def all_reduce(communicator: Any, tensors: Tensors, reduction: Any) -> Stages:
    """Reduce the tensors in place on every rank."""
    buffer, unpack = landing(tensors, filled=True)
    operation = operator(reduction, buffer.dtype)
    yield [communicator.Iallreduce(library().IN_PLACE, elements(buffer), operation)]
    _average(buffer, reduction, communicator.Get_size())
    unpack()


def reduce(communicator: Any, tensors: Tensors, reduction: Any, root: int) -> Stages:
    """Reduce the tensors in place on the root."""
    is_root = communicator.Get_rank() == root
    buffer, unpack = landing(tensors, filled=True)
    operation = operator(reduction, buffer.dtype)
    own = elements(buffer)
    sent, received = (library().IN_PLACE, own) if is_root else (own, None)
    yield [communicator.Ireduce(sent, received, operation, root)]
    if is_root:
        _average(buffer, reduction, communicator.Get_size())
        unpack()


def all_reduce_sparse(communicator: Any, later_stages: Any, tensors: Tensors) -> Stages:
    """Replace the content of sparse tensors by the sum over the ranks.

    Ranks exchange the numbers of their values first, then positions and values.
    """
    for tensor in tensors:
        own = tensor.detach().coalesce()
        numbers = torch.empty(communicator.Get_size(), dtype=torch.int64)
        yield [communicator.Iallgather(memory(torch.tensor([own._nnz()])), memory(numbers))]
        counts = numbers.tolist()
        positions = _gathered(own.indices().t().contiguous(), counts)
        values = _gathered(own.values().contiguous(), counts)
        yield [later_stages.Iallgatherv(memory(part), received) for part, _, received in (positions, values)]
        tensor.detach().copy_(torch.sparse_coo_tensor(positions[1].t(), values[1], own.shape).coalesce())


def _gathered(part: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    """Return the part, a tensor for all ranks' parts, and that tensor as a buffer of unequal parts."""
    gathered = part.new_empty((sum(counts), *part.shape[1:]))
    row_bytes = part[:1].new_empty((1, *part.shape[1:])).numel() * part.element_size()
    address, _, byte = memory(gathered)
    return part, gathered, [address, [count * row_bytes for count in counts], byte]


def broadcast(communicator: Any, tensors: Tensors, root: int) -> Stages:
    """Copy the root's tensors to every rank."""
    buffer, unpack = landing(tensors, filled=True)
    yield [communicator.Ibcast(memory(buffer), root)]
    unpack()


def all_gather(communicator: Any, pairs: Sequence[tuple[Tensors, torch.Tensor]]) -> Stages:
    """For each pair, gather the ranks' second tensors into the first, by rank."""
    landings, requests = [], []
    for gathered, own in pairs:
        buffer, unpack = landing(gathered)
        landings.append(unpack)
        requests.append(communicator.Iallgatherv(memory(flat([own])), _parts(buffer, gathered, communicator)))
    yield requests
    for unpack in landings:
        unpack()


def reduce_scatter(communicator: Any, pairs: Sequence[tuple[torch.Tensor, Tensors]], reduction: Any) -> Stages:
    """For each pair, reduce the second tensors over the ranks, and leave this rank's part in the first."""
    landings, requests = [], []
    for result, parts in pairs:
        source = flat(parts)
        buffer, unpack = landing([result])
        landings.append((buffer, unpack))
        counts = _counts(source, parts, communicator)
        operation = operator(reduction, source.dtype)
        requests.append(communicator.Ireduce_scatter(elements(source), elements(buffer), counts, operation))
    yield requests
    for buffer, unpack in landings:
        _average(buffer, reduction, communicator.Get_size())
        unpack()


def gather(communicator: Any, gathered: Tensors, own: torch.Tensor, root: int) -> Stages:
    """Gather the ranks' tensors on the root, by rank; elsewhere `gathered` is empty."""
    source = memory(flat([own]))
    if communicator.Get_rank() != root:
        yield [communicator.Igatherv(source, None, root)]
        return
    buffer, unpack = landing(gathered)
    yield [communicator.Igatherv(source, _parts(buffer, gathered, communicator), root)]
    unpack()


def scatter(communicator: Any, own: torch.Tensor, parts: Tensors, root: int) -> Stages:
    """Give each rank its part of the root's tensors; elsewhere `parts` is empty."""
    buffer, unpack = landing([own])
    source = None
    if communicator.Get_rank() == root:
        packed = flat(parts)
        source = _parts(packed, parts, communicator)
    yield [communicator.Iscatterv(source, memory(buffer), root)]
    unpack()


def all_to_all(communicator: Any, results: Tensors, parts: Tensors) -> Stages:
    """Send part i to rank i, and receive result i from it."""
    source = flat(parts)
    buffer, unpack = landing(results)
    yield [communicator.Ialltoallv(_parts(source, parts, communicator), _parts(buffer, results, communicator))]
    unpack()


def split_all_to_all(
    communicator: Any, result: torch.Tensor, own: torch.Tensor, result_rows: list[int], own_rows: list[int]
) -> Stages:
    """As `all_to_all`, with one tensor for all parts, cut along the first dimension; equally if a list is empty."""
    source = flat([own])
    buffer, unpack = landing([result])
    sent, received = (
        [address, _row_bytes(tensor, rows, communicator), byte]
        for tensor, rows, (address, _, byte) in ((own, own_rows, memory(source)), (result, result_rows, memory(buffer)))
    )
    yield [communicator.Ialltoallv(sent, received)]
    unpack()


def barrier(communicator: Any) -> Stages:
    """End when every rank has arrived."""
    yield [communicator.Ibarrier()]


def send(communicator: Any, tensors: Tensors, destination: int, tag: int) -> Stages:
    """Send the tensors to a rank."""
    yield [communicator.Isend(memory(flat([tensor])), destination, tag) for tensor in tensors]


def receive(communicator: Any, tensors: Tensors, source: int | None, tag: int) -> Stages:
    """Receive the tensors from a rank, or from any rank."""
    landings = [landing([tensor]) for tensor in tensors]
    sender = library().ANY_SOURCE if source is None else source
    yield [communicator.Irecv(memory(buffer), sender, tag) for buffer, _ in landings]
    for _, unpack in landings:
        unpack()


def _counts(buffer: torch.Tensor, parts: Tensors, communicator: Any) -> list[int]:
    """Return the parts' numbers of elements; a single part is cut equally."""
    size = communicator.Get_size()
    if len(parts) == size:
        return [part.numel() for part in parts]
    if len(parts) != 1 or buffer.numel() % size:
        raise ValueError(f"ddpobs_mpi: {len(parts)} tensors of {buffer.numel()} elements for {size} ranks")
    return [buffer.numel() // size] * size


def _parts(buffer: torch.Tensor, parts: Tensors, communicator: Any) -> list[Any]:
    address, _, byte = memory(buffer)
    return [address, [count * buffer.element_size() for count in _counts(buffer, parts, communicator)], byte]


def _row_bytes(tensor: torch.Tensor, rows: list[int], communicator: Any) -> list[int]:
    size = communicator.Get_size()
    total = tensor.shape[0] if tensor.dim() else 1
    if (rows and (len(rows) != size or sum(rows) != total)) or (not rows and total % size):
        raise ValueError(f"ddpobs_mpi: {total} rows cannot be cut into {rows or size} for {size} ranks")
    row_bytes = tensor.numel() // max(total, 1) * tensor.element_size()
    return [count * row_bytes for count in rows or [total // size] * size]


def _average(buffer: torch.Tensor, reduction: Any, size: int) -> None:
    if averages(reduction):
        buffer.div_(size, rounding_mode=None if buffer.is_floating_point() or buffer.is_complex() else "trunc")
