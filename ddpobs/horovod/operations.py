"""What Horovod's collectives have in common: the operation, the agreement of the ranks, and the gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddpobs.errors import HorovodError, HorovodUnsupportedError
from ddpobs.horovod import agreement
from ddpobs.horovod.agreement import Agreement
from ddpobs.horovod.calls import Call
from ddpobs.horovod.handle import Handle
from ddpobs.horovod.process import ProcessSet

Average, Sum, Adasum, Min, Max, Product = "Average", "Sum", "Adasum", "Min", "Max", "Product"
TORCH_OPS = {
    Average: dist.ReduceOp.SUM,  # gloo has no average.
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}


def check_op(op: str | None, average: bool | None = None) -> str:
    """Return the chosen operation; Average by default.

    Raises:
        HorovodError: The operation does not exist, or both `op` and `average` were given.
        HorovodUnsupportedError: Adasum.
    """
    if average is not None:
        if op is not None:
            raise HorovodError("give either op or average (which Horovod deprecates), not both")
        return Average if average else Sum
    if op == Adasum:
        raise HorovodUnsupportedError(
            "Adasum is not supported: use op=Average, with the learning rate scaled by size()"
        )
    if op is not None and op not in TORCH_OPS:
        raise HorovodError(f"op: expected one of {', '.join(TORCH_OPS)}, got {op!r}")
    return op or Average


def sum_or_average(op: str | None, function: str) -> str:
    """Return the chosen operation of a function that supports only Sum and Average.

    Args:
        op: The user's choice; Average by default.
        function: The function's name, for the message.

    Raises:
        HorovodError: Another operation.
    """
    op = check_op(op)
    if op not in (Sum, Average):
        raise HorovodError(f"{function}: expected op Sum or Average, got {op}")
    return op


def start(call: Call, process_set: ProcessSet) -> Agreement:
    """Return when this rank may start a collective, on which all ranks agree.

    Returns:
        For its `Handle`, and with its process group.

    Raises:
        MismatchError: The ranks called different ones. Raised on every rank.
        HorovodInternalError: A rank has left, or did not come in time.
    """
    agreed = agreement.of(process_set)
    agreed.check(call)
    return agreed


# ---------------------------------------------------------------------- allreduce


def merge(handles: Sequence[Handle]) -> Handle:
    """Return one handle for several collectives; its result is the list of theirs."""
    first = handles[0]
    works = [work for handle in handles for work in handle.works]
    return Handle(works, lambda: [handle.wait() for handle in handles], first.agreed, first.on_gpu)


def differentiable(
    tensor: torch.Tensor,
    forward: Callable[[torch.Tensor], torch.Tensor],
    backward: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Run a collective; if gradients flow through the tensor, its gradient is computed by `backward`."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return forward(tensor)
    return _Collective.apply(tensor, forward, backward)  # type: ignore[no-any-return, no-untyped-call]


class _Collective(torch.autograd.Function):
    """A collective, and the collective that computes its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, run: Any, back: Any) -> Any:
        """Run the collective."""
        ctx.back = back
        return run(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Run the gradient's collective."""
        return ctx.back(gradients[0].contiguous()), None, None


def write_back(tensor: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    """Copy the result into a tensor that is not contiguous, because backends write contiguous memory only."""
    if not tensor.is_contiguous():
        with torch.no_grad():
            tensor.copy_(dense)
    return tensor


def numbered(name: str | None, index: int) -> str | None:
    """The name of one of several tensors."""
    return None if name is None else f"{name}.{index}"
