"""Horovod's collectives on top of torch.distributed's, and their handles.

As in Horovod, the functions that return a new tensor can be differentiated. Functions that end in `_` or return a
handle cannot. Every rank makes the same calls in the same order. `name` is compared between the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddpobs.errors import HorovodError
from ddpobs.horovod.agreement import Agreement
from ddpobs.horovod.allreduce import allreduce, start_allreduce
from ddpobs.horovod.calls import Call, described, described_rows
from ddpobs.horovod.compression import Compression, Compressor
from ddpobs.horovod.dtypes import as_movable
from ddpobs.horovod.handle import Handle, started, synchronize, wait_for
from ddpobs.horovod.operations import (
    Average,
    Sum,
    differentiable,
    merge,
    numbered,
    start,
    sum_or_average,
    write_back,
)
from ddpobs.horovod.process import ProcessSet, global_process_set


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to concatenate the ranks' tensors along the first dimension, where their lengths may differ."""
    return _gather(tensor, name, process_set)[0]


def _gather(tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> tuple[Handle, list[int]]:
    local = tensor.detach().contiguous()
    local = local.reshape(1) if local.ndim == 0 else local
    agreed = start(Call("allgather", name, tensors=(described_rows(local),)), process_set)
    group, on_gpu = agreed.group, tensor.is_cuda
    row_count = local.new_tensor([len(local)], dtype=torch.int64)
    row_counts = [torch.empty_like(row_count) for _ in range(process_set.size())]
    wait_for([dist.all_gather(row_counts, row_count, group=group, async_op=True)], agreed, on_gpu)
    lengths = [int(length) for length in row_counts]
    padded = local.new_zeros((max(lengths), *local.shape[1:]))
    padded[: len(local)] = local
    parts = [torch.empty_like(padded) for _ in lengths]
    work = dist.all_gather([as_movable(part) for part in parts], as_movable(padded), group=group, async_op=True)
    finish = lambda: torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])  # noqa: E731
    return started(Handle([work], finish, agreed, on_gpu), "allgather", tensor, name), lengths


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """As `allgather_async`, but waits; its gradient is this rank's part of the ranks' mean."""
    lengths: list[int] = []

    def gather(value: torch.Tensor) -> torch.Tensor:
        handle, lengths[:] = _gather(value, name, process_set)
        return handle.wait()  # type: ignore[no-any-return]

    def back(gradient: torch.Tensor) -> torch.Tensor:
        mean = allreduce(gradient, op=Average, process_set=process_set)
        part: torch.Tensor = mean.split(lengths)[process_set.rank()]
        return part.reshape(tensor.shape)

    return differentiable(tensor, gather, back)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """As `allgather_async` for each; the result is a list."""
    return merge([allgather_async(tensor, numbered(name, i), process_set) for i, tensor in enumerate(tensors)])


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """As `allgather` for each."""
    return [allgather(tensor, numbered(name, i), process_set) for i, tensor in enumerate(tensors)]


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to copy `root_rank`'s values into every rank's tensor; the global rank, also in a process set."""
    call = Call("broadcast", name, (("root_rank", int(root_rank)),), (described(tensor),))
    return start_broadcast(tensor, root_rank, name, start(call, process_set))


def start_broadcast(tensor: torch.Tensor, root_rank: int, name: str | None, agreed: Agreement) -> Handle:
    """Start a broadcast on which the ranks have agreed."""
    dense = tensor.detach().contiguous()
    work = dist.broadcast(as_movable(dense), root_rank, group=agreed.group, async_op=True)
    handle = Handle([work], lambda: write_back(tensor, dense), agreed, tensor.is_cuda)
    return started(handle, "broadcast", tensor, name)


def broadcast_async(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Handle:
    """As `broadcast_async_`, into a new tensor."""
    return broadcast_async_(tensor.detach().clone(), *args, **kwargs)


def broadcast_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As `broadcast_async_`, but waits."""
    return synchronize(broadcast_async_(tensor, *args, **kwargs))  # type: ignore[no-any-return]


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """As `broadcast_async_`, into a new tensor; its gradient is the ranks' mean at the root and zero elsewhere."""

    def back(gradient: torch.Tensor) -> torch.Tensor:
        mean = allreduce(gradient, op=Average, process_set=process_set)
        return mean if dist.get_rank() == root_rank else torch.zeros_like(mean)

    return differentiable(tensor, lambda value: broadcast_(value.detach().clone(), root_rank, name, process_set), back)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to send each rank its rows. The result is the received rows; with `splits` also the counts per rank.

    Args:
        tensor: Rows, beginning with rank 0's.
        splits: Number of rows for each rank; without it all ranks get equally many.
        name: Compared between the ranks.
        process_set: The ranks that take part.

    Raises:
        HorovodError: The rows cannot be split like this.
    """
    handle, received = _exchange(tensor, splits, name, process_set)
    return handle if splits is None else handle.then(lambda result: (result, received))


def _exchange(
    tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, name: str | None, process_set: ProcessSet
) -> tuple[Handle, torch.Tensor]:
    size = process_set.size()
    if splits is None and len(tensor) % size:
        raise HorovodError(f"alltoall: {len(tensor)} rows do not split evenly over {size} ranks; give splits")
    counts = [len(tensor) // size] * size if splits is None else [int(split) for split in splits]
    if len(counts) != size or sum(counts) != len(tensor) or min(counts) < 0:
        raise HorovodError(f"alltoall: expected {size} splits that add up to {len(tensor)} rows, got {counts}")
    agreed, on_gpu = start(Call("alltoall", name, tensors=(described_rows(tensor),)), process_set), tensor.is_cuda
    group = agreed.group
    outgoing = tensor.new_tensor(counts, dtype=torch.int64)
    received = torch.empty_like(outgoing)
    wait_for([dist.all_to_all_single(received, outgoing, group=group, async_op=True)], agreed, on_gpu)
    rows: list[int] = received.tolist()
    result = tensor.new_empty((sum(rows), *tensor.shape[1:]))
    source, target = as_movable(tensor.detach().contiguous()), as_movable(result)
    if source.dtype != tensor.dtype:  # It travels as bytes.
        row_bytes = tensor.element_size() * math.prod(tensor.shape[1:])
        rows, counts = [row_bytes * count for count in rows], [row_bytes * count for count in counts]
    work = dist.all_to_all_single(target, source, rows, counts, group=group, async_op=True)
    return started(Handle([work], lambda: result, agreed, on_gpu), "alltoall", tensor, name), received


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """As `alltoall_async`, but waits; its gradient returns each row's gradient to the row's sender."""
    received: list[torch.Tensor] = []

    def exchange(value: torch.Tensor) -> torch.Tensor:
        handle, rows = _exchange(value, splits, name, process_set)
        received.append(rows)
        return handle.wait()  # type: ignore[no-any-return]

    def back(gradient: torch.Tensor) -> torch.Tensor:
        return alltoall(gradient, received[0], process_set=process_set)[0]  # type: ignore[no-any-return]

    result = differentiable(tensor, exchange, back)
    return result if splits is None else (result, received[0])


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a reduction that gives each rank its share of rows; if uneven, the first ranks get one row more.

    Raises:
        HorovodError: Neither Sum nor Average, or a tensor without rows.
    """
    factors = (prescale_factor, postscale_factor)
    return _scatter(tensor.detach().clone(), name, op, factors, process_set, Compression.none)


def _scatter(
    tensor: torch.Tensor,
    name: str | None,
    op: str | None,
    factors: tuple[float, float],
    process_set: ProcessSet,
    compression: type[Compressor],
) -> Handle:
    op = sum_or_average(op, "reducescatter")
    if tensor.ndim == 0:
        raise HorovodError("reducescatter: expected a tensor with rows, got a scalar: use allreduce")
    (handle,) = start_allreduce("reducescatter", [tensor], name, op, *factors, process_set, compression=compression)
    index, parts = process_set.rank(), process_set.size()
    return handle.then(lambda result: result.tensor_split(parts)[index].clone())


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """As `reducescatter_async`, with compression, but waits.

    Its gradient is the concatenation of all ranks' gradients, scaled by both factors; for Sum multiplied by the number
    of ranks.
    """
    factors = (prescale_factor, postscale_factor)

    def reduce_scatter(value: torch.Tensor) -> torch.Tensor:
        small, context = compression.compress(value.detach().clone())
        return compression.decompress(_scatter(small, name, op, factors, process_set, compression).wait(), context)

    def back(gradient: torch.Tensor) -> torch.Tensor:
        scale = prescale_factor * postscale_factor * (process_set.size() if op == Sum else 1)
        return allgather(gradient * scale, process_set=process_set)

    return differentiable(tensor, reduce_scatter, back)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, *args: Any, **kwargs: Any
) -> Handle:
    """As `reducescatter_async` for each; the result is a list."""
    return merge([reducescatter_async(t, numbered(name, i), *args, **kwargs) for i, t in enumerate(tensors)])


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor], name: str | None = None, *args: Any, **kwargs: Any
) -> list[torch.Tensor]:
    """As `reducescatter` for each."""
    return [reducescatter(tensor, numbered(name, i), *args, **kwargs) for i, tensor in enumerate(tensors)]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the set has called this."""
    agreed = start(Call("barrier"), process_set)
    wait_for([dist.barrier(agreed.group, async_op=True)], agreed, on_gpu=torch.cuda.is_available())
