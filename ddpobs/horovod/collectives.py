"""Horovod's collectives over torch.distributed's: handles, and the calls that make them.

The functions that return a new tensor can be differentiated, as in Horovod; those ending in `_` and those that return a
handle cannot. Names are taken and not needed: every rank makes the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddpobs.errors import HorovodError
from ddpobs.horovod.compression import Compression, Compressor
from ddpobs.horovod.process import ProcessSet, global_process_set

Average, Sum, Adasum, Min, Max, Product = "Average", "Sum", "Adasum", "Min", "Max", "Product"
_TORCH_OPS = {
    Average: dist.ReduceOp.SUM,  # gloo has no average.
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}


def check_op(op: str | None, average: bool | None = None) -> str:
    """The operation that is meant, Average if nothing is said.

    Raises:
        HorovodError: There is none of that name here; or both forms of asking were used.
    """
    if average is not None:
        if op is not None:
            raise HorovodError("give either op or average (which Horovod deprecates), not both")
        return Average if average else Sum
    if op == Adasum:
        raise HorovodError("Adasum is not there: use op=Average, with the learning rate scaled by size()")
    if op is not None and op not in _TORCH_OPS:
        raise HorovodError(f"op: expected one of {', '.join(_TORCH_OPS)}, got {op!r}")
    return op or Average


class Handle:
    """A collective under way."""

    __slots__ = ("_finish", "_works")

    def __init__(self, works: Sequence[Any], finish: Callable[[], Any]) -> None:
        self._works, self._finish = list(works), finish

    def poll(self) -> bool:
        """Whether it is done."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> Any:
        """Its result, once it is done; the same however often."""
        for work in self._works:
            work.wait()
        result = self._finish()
        self._finish = lambda: result
        return result


def poll(handle: Handle) -> bool:
    """Whether `synchronize` would return at once."""
    return handle.poll()


def synchronize(handle: Handle) -> Any:
    """Wait for a collective; its result."""
    return handle.wait()


# ---------------------------------------------------------------------- allreduce


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
        tensor: Of the same shape on every rank.
        average: Horovod's older way of saying `op`.
        name: Not needed.
        op: Average, Sum, Min, Max or Product.
        prescale_factor: Multiplied in before.
        postscale_factor: Multiplied in after.
        process_set: Who takes part.

    Raises:
        HorovodError: An operation that there is not, or a rank that is not of the set.
    """
    op = check_op(op, average)
    with torch.no_grad():
        _scale(tensor, prescale_factor)
        travels = tensor.detach().contiguous()
        work = dist.all_reduce(travels, _TORCH_OPS[op], group=process_set.group, async_op=True)

    def finish() -> torch.Tensor:
        with torch.no_grad():
            if op == Average:
                whole = not (travels.is_floating_point() or travels.is_complex())
                travels.div_(process_set.size(), rounding_mode="trunc" if whole else None)
            _scale(travels, postscale_factor)
            return _given_back(tensor, travels)

    return Handle([work], finish)


def _scale(tensor: torch.Tensor, factor: float) -> None:
    """In place; whole numbers lose what comes after the point, as in Horovod."""
    if factor == 1.0:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double() * factor)


def _given_back(tensor: torch.Tensor, travelled: torch.Tensor) -> torch.Tensor:
    """The tensor, with what came for it where it is not contiguous: a backend writes as if it were."""
    if not tensor.is_contiguous():
        with torch.no_grad():
            tensor.copy_(travelled)
    return tensor


def allreduce_async(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Handle:
    """As `allreduce_async_`, into a new tensor."""
    return allreduce_async_(tensor.detach().clone(), *args, **kwargs)


def allreduce_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As `allreduce_async_`, waited for."""
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
    """As `allreduce_async_` with a `compression` for the way, into a new tensor; its gradient is reduced likewise."""
    settings = (check_op(op, average), prescale_factor, postscale_factor, process_set)

    def reduced(whole: torch.Tensor) -> torch.Tensor:
        small, context = compression.compress(whole.detach().clone())
        return compression.decompress(allreduce_(small, None, None, *settings), context)

    return _differentiable(tensor, reduced, lambda gradient: allreduce(gradient, None, None, compression, *settings))


def grouped_allreduce_async_(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Handle:
    """As `allreduce_async_` for each; the result is a list."""
    return _together([allreduce_async_(tensor, *args, **kwargs) for tensor in tensors])


def grouped_allreduce_async(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Handle:
    """As `allreduce_async` for each; the result is a list."""
    return _together([allreduce_async(tensor, *args, **kwargs) for tensor in tensors])


def grouped_allreduce_(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """As `grouped_allreduce_async_`, waited for."""
    return synchronize(grouped_allreduce_async_(tensors, *args, **kwargs))  # type: ignore[no-any-return]


def grouped_allreduce(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """As `allreduce` for each."""
    return [allreduce(tensor, *args, **kwargs) for tensor in tensors]


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start the Sum or Average of sparse tensors; the result is a new one.

    Raises:
        HorovodError: Another operation.
    """
    op = check_op(op)
    if op not in (Sum, Average):
        raise HorovodError(f"sparse_allreduce_async: expected Sum or Average, got {op}")
    total = tensor.detach().coalesce().clone()
    work = dist.all_reduce(total, group=process_set.group, async_op=True)
    return Handle([work], lambda: total / process_set.size() if op == Average else total)


# ---------------------------------------------------------------------- the others


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start gathering: the ranks' tensors one after the other along the first dimension, which may differ in length."""
    return _gather(tensor, process_set)[0]


def _gather(tensor: torch.Tensor, process_set: ProcessSet) -> tuple[Handle, list[int]]:
    mine = tensor.detach().contiguous()
    mine = mine.reshape(1) if mine.ndim == 0 else mine
    group = process_set.group
    rows = mine.new_tensor([len(mine)], dtype=torch.int64)
    everyone = [torch.empty_like(rows) for _ in range(process_set.size())]
    dist.all_gather(everyone, rows, group=group)
    lengths = [int(length) for length in everyone]
    padded = mine.new_zeros((max(lengths), *mine.shape[1:]))
    padded[: len(mine)] = mine
    parts = [torch.empty_like(padded) for _ in lengths]
    work = dist.all_gather(parts, padded, group=group, async_op=True)
    finish = lambda: torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])  # noqa: E731
    return Handle([work], finish), lengths


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """As `allgather_async`, waited for; its gradient is this rank's part of the ranks' mean."""
    lengths: list[int] = []

    def gathered(whole: torch.Tensor) -> torch.Tensor:
        handle, lengths[:] = _gather(whole, process_set)
        return handle.wait()  # type: ignore[no-any-return]

    def back(gradient: torch.Tensor) -> torch.Tensor:
        mean = allreduce(gradient, op=Average, process_set=process_set)
        mine: torch.Tensor = mean.split(lengths)[process_set.rank()]
        return mine.reshape(tensor.shape)

    return _differentiable(tensor, gathered, back)


def grouped_allgather_async(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Handle:
    """As `allgather_async` for each; the result is a list."""
    return _together([allgather_async(tensor, *args, **kwargs) for tensor in tensors])


def grouped_allgather(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """As `allgather` for each."""
    return [allgather(tensor, *args, **kwargs) for tensor in tensors]


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to have every rank's tensor hold what `root_rank`'s holds; a rank's number in the whole, also in a set."""
    travels = tensor.detach().contiguous()
    work = dist.broadcast(travels, root_rank, group=process_set.group, async_op=True)
    return Handle([work], lambda: _given_back(tensor, travels))


def broadcast_async(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Handle:
    """As `broadcast_async_`, into a new tensor."""
    return broadcast_async_(tensor.detach().clone(), *args, **kwargs)


def broadcast_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As `broadcast_async_`, waited for."""
    return synchronize(broadcast_async_(tensor, *args, **kwargs))  # type: ignore[no-any-return]


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """As `broadcast_async_`, into a new tensor; its gradient is the ranks' mean at the root and zero elsewhere."""

    def back(gradient: torch.Tensor) -> torch.Tensor:
        mean = allreduce(gradient, op=Average, process_set=process_set)
        return mean if dist.get_rank() == root_rank else torch.zeros_like(mean)

    return _differentiable(
        tensor, lambda whole: broadcast_(whole.detach().clone(), root_rank, process_set=process_set), back
    )


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to send each rank its rows. The result is the rows received; with `splits` also how many from each.

    Args:
        tensor: Rows, for rank 0 first.
        splits: How many go to each rank; evenly without.
        name: Not needed.
        process_set: Who takes part.

    Raises:
        HorovodError: The rows cannot be split so.
    """
    handle, received = _exchange(tensor, splits, process_set)
    return Handle(handle._works, lambda: handle.wait() if splits is None else (handle.wait(), received))


def _exchange(
    tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, process_set: ProcessSet
) -> tuple[Handle, torch.Tensor]:
    size, group = process_set.size(), process_set.group
    if splits is None and len(tensor) % size:
        raise HorovodError(f"alltoall: {len(tensor)} rows do not split evenly over {size} ranks; give splits")
    given = [len(tensor) // size] * size if splits is None else [int(split) for split in splits]
    if len(given) != size or sum(given) != len(tensor) or min(given) < 0:
        raise HorovodError(f"alltoall: expected {size} splits that add up to {len(tensor)} rows, got {given}")
    sent = tensor.new_tensor(given, dtype=torch.int64)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    rows: list[int] = received.tolist()
    result = tensor.new_empty((sum(rows), *tensor.shape[1:]))
    work = dist.all_to_all_single(result, tensor.detach().contiguous(), rows, given, group=group, async_op=True)
    return Handle([work], lambda: result), received


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """As `alltoall_async`, waited for; its gradient goes back the way the rows came."""
    received: list[torch.Tensor] = []

    def exchanged(whole: torch.Tensor) -> torch.Tensor:
        handle, rows = _exchange(whole, splits, process_set)
        received.append(rows)
        return handle.wait()  # type: ignore[no-any-return]

    def back(gradient: torch.Tensor) -> torch.Tensor:
        return alltoall(gradient, received[0], process_set=process_set)[0]  # type: ignore[no-any-return]

    result = _differentiable(tensor, exchanged, back)
    return result if splits is None else (result, received[0])


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a reduction of which this rank gets its share of rows; the first ranks get one more where it is uneven.

    Raises:
        HorovodError: Neither Sum nor Average.
    """
    op = check_op(op)
    if op not in (Sum, Average):
        raise HorovodError(f"reducescatter: expected Sum or Average, got {op}")
    handle = allreduce_async(tensor, op=op, process_set=process_set)
    place, parts = process_set.rank(), process_set.size()

    def finish() -> torch.Tensor:
        mine: torch.Tensor = handle.wait().tensor_split(parts)[place].clone()
        return mine

    return Handle(handle._works, finish)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """As `reducescatter_async` with a `compression` for the way, waited for.

    Its gradient is all ranks', gathered, and for Sum times their number.
    """

    def reduced(whole: torch.Tensor) -> torch.Tensor:
        small, context = compression.compress(whole)
        return compression.decompress(synchronize(reducescatter_async(small, name, op, process_set)), context)

    def back(gradient: torch.Tensor) -> torch.Tensor:
        scaled = gradient * process_set.size() if op == Sum else gradient
        return allgather(scaled, process_set=process_set)

    return _differentiable(tensor, reduced, back)


def grouped_reducescatter_async(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Handle:
    """As `reducescatter_async` for each; the result is a list."""
    return _together([reducescatter_async(tensor, *args, **kwargs) for tensor in tensors])


def grouped_reducescatter(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """As `reducescatter` for each."""
    return [reducescatter(tensor, *args, **kwargs) for tensor in tensors]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the set is here."""
    dist.barrier(process_set.group)


def _together(handles: list[Handle]) -> Handle:
    return Handle([work for handle in handles for work in handle._works], lambda: [h.wait() for h in handles])


def _differentiable(
    tensor: torch.Tensor,
    forward: Callable[[torch.Tensor], torch.Tensor],
    backward: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    return _Collective.apply(tensor, forward, backward)  # type: ignore[no-any-return, no-untyped-call]


class _Collective(torch.autograd.Function):
    """A collective and the one that brings its gradient back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, run: Any, back: Any) -> Any:
        """Run it."""
        ctx.back = back
        return run(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Run the other one."""
        return ctx.back(gradients[0].contiguous()), None, None
