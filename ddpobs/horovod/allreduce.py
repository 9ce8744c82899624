"""Horovod's all-reduce, single, grouped and sparse.

As in Horovod, the functions that return a new tensor can be differentiated; see `collectives`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddpobs.horovod import agreement
from ddpobs.horovod.agreement import Agreement
from ddpobs.horovod.calls import Call, described
from ddpobs.horovod.compression import Compression, Compressor
from ddpobs.horovod.dtypes import check_reducible
from ddpobs.horovod.handle import Handle, started, synchronize
from ddpobs.horovod.operations import (
    TORCH_OPS,
    Average,
    check_op,
    differentiable,
    merge,
    numbered,
    start,
    sum_or_average,
    write_back,
)
from ddpobs.horovod.process import ProcessSet, global_process_set


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a reduction in place, over the set's ranks.

    Args:
        tensor: A tensor of the same shape on every rank.
        average: Horovod's older form of `op`.
        name: Compared between the ranks.
        op: Average, Sum, Min, Max or Product.
        prescale_factor: Factor before the reduction.
        postscale_factor: Factor after the reduction.
        process_set: The ranks that take part.

    Raises:
        HorovodError: The operation does not exist, or this rank is not in the set.
        MismatchError: The ranks' tensors or arguments differ. Raised on every rank, here or by the handle.
    """
    (handle,) = start_allreduce(
        "allreduce", [tensor], name, op, prescale_factor, postscale_factor, process_set, average
    )
    return handle


def start_allreduce(
    function: str,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: str | None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    average: bool | None = None,
    compression: type[Compressor] = Compression.none,
) -> list[Handle]:
    """Start reductions in place, on which the ranks agree together."""
    op = check_op(op, average)
    prescale_factor, postscale_factor = float(prescale_factor), float(postscale_factor)
    compressor = compression if isinstance(compression, type) else type(compression)
    parts = [part for tensor in tensors for part in (tensor.dtype, tensor.shape, tensor.is_cuda)]
    key = (function, name, op, prescale_factor, postscale_factor, compressor, *parts)

    def build() -> Call:
        factors = (prescale_factor, postscale_factor)
        settings = (("op", op), ("factors", factors), ("compression", compressor))
        return Call(function, name, settings, tuple([described(tensor) for tensor in tensors]))

    agreed = agreement.of(process_set)
    agreed.check(key, build)
    for tensor in tensors:
        check_reducible(tensor.dtype, op, function, agreed.group)
    names = [name] if len(tensors) == 1 else [numbered(name, index) for index in range(len(tensors))]
    operation = function.removeprefix("grouped_")
    return [
        started(_start_reduction(tensor, op, prescale_factor, postscale_factor, agreed), operation, tensor, one)
        for tensor, one in zip(tensors, names, strict=True)
    ]


def _start_reduction(
    tensor: torch.Tensor, op: str, prescale_factor: float, postscale_factor: float, agreed: Agreement
) -> Handle:
    group = agreed.group
    with torch.no_grad():
        _scale(tensor, prescale_factor)
        dense = tensor.detach().contiguous()
        work = dist.all_reduce(dense, TORCH_OPS[op], group=group, async_op=True)

    def finish() -> torch.Tensor:
        with torch.no_grad():
            if op == Average:
                is_integer = not (dense.is_floating_point() or dense.is_complex())
                dense.div_(group.size(), rounding_mode="trunc" if is_integer else None)
            _scale(dense, postscale_factor)
            return write_back(tensor, dense)

    return Handle([work], finish, agreed, tensor.is_cuda)


def _scale(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place; integers lose the fraction, as in Horovod."""
    if factor == 1.0:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double() * factor)


def allreduce_async(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Handle:
    """As `allreduce_async_`, into a new tensor."""
    return allreduce_async_(tensor.detach().clone(), *args, **kwargs)


def allreduce_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As `allreduce_async_`, but waits."""
    return synchronize(allreduce_async_(tensor, *args, **kwargs))  # type: ignore[no-any-return]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """As `allreduce_async_`, with compression, into a new tensor; its gradient is reduced the same way."""
    settings = (check_op(op, average), prescale_factor, postscale_factor, process_set)

    def reduce(value: torch.Tensor) -> torch.Tensor:
        small, context = compression.compress(value.detach().clone())
        (handle,) = start_allreduce("allreduce", [small], name, *settings, compression=compression)
        return compression.decompress(handle.wait(), context)

    return differentiable(tensor, reduce, lambda gradient: allreduce(gradient, None, None, compression, *settings))


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As `allreduce_async_` for each; the result is a list."""
    factors = (prescale_factor, postscale_factor)
    return merge(start_allreduce("grouped_allreduce", tensors, name, op, *factors, process_set, average))


def grouped_allreduce_async(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Handle:
    """As `allreduce_async` for each; the result is a list."""
    return grouped_allreduce_async_([tensor.detach().clone() for tensor in tensors], *args, **kwargs)


def grouped_allreduce_(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """As `grouped_allreduce_async_`, but waits."""
    return synchronize(grouped_allreduce_async_(tensors, *args, **kwargs))  # type: ignore[no-any-return]


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> list[torch.Tensor]:
    """As `allreduce` for each."""
    return [allreduce(tensor, average, numbered(name, i), *args, **kwargs) for i, tensor in enumerate(tensors)]


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start the Sum or Average of sparse tensors, into a new tensor.

    Raises:
        HorovodError: Another operation.
    """
    op = sum_or_average(op, "sparse_allreduce_async")
    agreed = start(Call("sparse_allreduce", name, (("op", op),), (described(tensor),)), process_set)
    check_reducible(tensor.dtype, op, "sparse_allreduce", agreed.group)
    total = tensor.detach().coalesce().clone()
    work = dist.all_reduce(total, group=agreed.group, async_op=True)
    handle = Handle([work], lambda: total / process_set.size() if op == Average else total, agreed, tensor.is_cuda)
    return started(handle, "allreduce", tensor, name)
