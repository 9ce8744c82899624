"""Dtypes that the backends move and reduce."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ddpobs.errors import HorovodError

_NUMBERS = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.uint8, torch.int8, torch.int32, torch.int64),
    }
)
"""Dtypes that gloo, NCCL and MPI reduce with every operation."""
_MOVED = _NUMBERS | {torch.bool, torch.complex64, torch.complex128}
_SUMS, _ORDERS = ("Sum", "Average"), ("Min", "Max", "Product")


def as_movable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or its bytes if the backends do not know the dtype: they are enough for a broadcast.

    Args:
        tensor: A contiguous tensor, whose memory the result shares.
    """
    return tensor if tensor.dtype in _MOVED else tensor.view(-1).view(torch.uint8)


def check_reducible(dtype: torch.dtype, op: str, function: str, group: dist.ProcessGroup) -> None:
    """Refuse a dtype that the group's backend does not reduce, after the ranks have agreed on it.

    Raises:
        HorovodError: With the alternative.
    """
    if dtype in _NUMBERS:
        return
    name = str(dtype).removeprefix("torch.")
    if dtype == torch.bool and op in _SUMS:
        raise HorovodError(f"{function}: {op} of bool has no meaning: use op=Max or Min, or tensor.to(torch.int32)")
    if dtype.is_complex and op in _ORDERS:
        raise HorovodError(f"{function}: {op} of {name} is not supported: use Sum, or torch.view_as_real(tensor)")
    if dtype not in _MOVED and dist.get_backend(group) != "ddpobs_mpi":
        wider = "float32" if dtype.is_floating_point else "int32"
        raise HorovodError(
            f"{function}: {dist.get_backend(group)} does not reduce {name}: use tensor.to(torch.{wider}). Broadcasts "
            "and gathers take every dtype"
        )
