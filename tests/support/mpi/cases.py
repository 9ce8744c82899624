"""Collectives, each called in the same way over two process groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

Call = Callable[[Any, torch.Tensor], Any]
"""Takes a group and this rank's tensor of 12 elements; returns the results."""

OP = dist.ReduceOp
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
)


def values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that differs between the ranks, of small numbers whose sums are exact in every dtype."""
    numbers = torch.arange(12) % 5 + 3 * rank
    if dtype == torch.bool:
        return numbers % 2 == 0
    return numbers.to(dtype) * ((1 + 1j) if dtype.is_complex else 1)


def all_reduce(group: Any, tensor: torch.Tensor, op: Any = OP.SUM) -> Any:
    dist.all_reduce(tensor, op, group=group)
    return tensor


def transposed(group: Any, tensor: torch.Tensor) -> Any:
    """Tensors that are not contiguous, in place and in lists."""
    view, other = tensor.view(3, 4).t(), torch.zeros(12, dtype=tensor.dtype).view(3, 4).t()
    dist.broadcast(view, 1, group=group)
    received = [torch.zeros_like(tensor).view(3, 4).t(), other]
    dist.all_gather(received, view.contiguous(), group=group)
    return [tensor, *received]


def asynchronous(group: Any, tensor: torch.Tensor) -> Any:
    """Several works at a time, waited for in the reverse order, and by their futures."""
    parts = [part.clone() for part in tensor.split(3)]
    works = [dist.all_reduce(part, group=group, async_op=True) for part in parts]
    by_future = works[0].get_future().wait()[0]  # Of a complex tensor, its real view.
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
    return [by_future.data_ptr() == parts[0].data_ptr(), *parts]


def reduce(group: Any, tensor: torch.Tensor) -> Any:
    dist.reduce(tensor, 1, group=group)
    return tensor if dist.get_rank() == 1 else None  # The others' tensors are undefined.


def gather(group: Any, tensor: torch.Tensor) -> Any:
    parts = [torch.zeros_like(tensor) for _ in range(2)] if dist.get_rank() == 1 else None
    dist.gather(tensor, parts, dst=1, group=group)
    return parts


def scatter(group: Any, tensor: torch.Tensor) -> Any:
    part = torch.zeros_like(tensor[:6])
    dist.scatter(part, list(tensor.split(6)) if dist.get_rank() == 0 else None, src=0, group=group)
    return part


def all_to_all_single(group: Any, tensor: torch.Tensor) -> Any:
    even, uneven = torch.zeros_like(tensor), torch.zeros_like(tensor)
    dist.all_to_all_single(even, tensor, group=group)
    sent = [5, 7] if dist.get_rank() == 0 else [7, 5]
    dist.all_to_all_single(uneven, tensor, sent, sent, group=group)
    return [even, uneven]


def send_and_receive(group: Any, tensor: torch.Tensor) -> Any:
    other, received = 1 - dist.get_rank(), torch.zeros_like(tensor)
    if dist.get_rank() == 0:
        dist.send(tensor, other, group=group, tag=3)
        assert dist.recv(received, group=group, tag=4) == other
    else:
        dist.recv(received, other, group=group, tag=3)
        dist.send(tensor, other, group=group, tag=4)
    both = [dist.P2POp(dist.isend, tensor, other, group), dist.P2POp(dist.irecv, received, other, group)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return received


def short_forms(group: Any, tensor: torch.Tensor) -> Any:
    """Call the group's methods with tensors, an operation and a root in place of lists and options."""
    group = group or dist.group.WORLD
    summed, largest, sent, first, part = (tensor.clone() for _ in range(5))
    parts = [torch.zeros_like(tensor) for _ in range(2)]
    works = [
        group.allreduce(summed),
        group.allreduce(largest, OP.MAX),
        group.broadcast(sent, 1),
        group.reduce(first, 0, OP.MIN),
        group.allgather(parts, tensor),
        group.scatter(part, [sent_to * 2 for sent_to in (tensor, -tensor)] if dist.get_rank() == 1 else [], root=1),
    ]
    for work in works:
        work.wait()
    return [summed, largest, sent, *([first] if dist.get_rank() == 0 else []), *parts, part]


def objects(group: Any, tensor: torch.Tensor) -> Any:
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, {"of rank": dist.get_rank()}, group=group)
    sent = [f"from {dist.get_rank()}"]
    dist.broadcast_object_list(sent, src=1, group=group)
    dist.barrier(group=group)
    return [gathered, sent]


def coalesced(group: Any, tensor: torch.Tensor) -> Any:
    parts = [part.clone() for part in tensor.split(4)]
    with distributed_c10d._coalescing_manager(group):
        for part in parts:
            dist.all_reduce(part, group=group)
    return parts


EVERY_DTYPE: dict[str, Call] = {
    "all_reduce": all_reduce,
    "asynchronous": asynchronous,
    "gather": gather,
    "scatter": scatter,
    "send_and_receive": send_and_receive,
    "transposed": transposed,
}
OF_FLOATS: dict[str, Call] = {
    **{f"all_reduce {op}": partial(all_reduce, op=op) for op in (OP.PRODUCT, OP.MIN, OP.MAX)},
    "all_to_all_single": all_to_all_single,
    "coalesced": coalesced,
    "objects": objects,
    "reduce": reduce,
    "short forms": short_forms,
}
OF_INTEGERS: dict[str, Call] = {f"all_reduce {op}": partial(all_reduce, op=op) for op in (OP.BAND, OP.BOR, OP.BXOR)}
