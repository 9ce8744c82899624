"""Tensors as MPI messages, and torch's reductions as MPI operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from ddpobs.errors import MpiError
from ddpobs.mpi.library import MPI

_Reduce = Callable[..., torch.Tensor]

_NUMBERS: dict[torch.dtype, MPI.Datatype] = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
    torch.bool: MPI.C_BOOL,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}
"""Types of elements that MPI reduces itself."""
_BY_SIZE = {1: MPI.BYTE, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T, 16: MPI.C_DOUBLE_COMPLEX}
"""Types of elements that are only moved. MPI counts elements in 31 bits, so bytes would limit tensors to 2 GiB."""

_REDUCTIONS: dict[str, MPI.Op] = {
    "SUM": MPI.SUM,
    "AVG": MPI.SUM,
    "PRODUCT": MPI.PROD,
    "MIN": MPI.MIN,
    "MAX": MPI.MAX,
    "BAND": MPI.BAND,
    "BOR": MPI.BOR,
    "BXOR": MPI.BXOR,
}
_OF_BOOL = {
    "SUM": MPI.LOR,
    "PRODUCT": MPI.LAND,
    "MIN": MPI.LAND,
    "MAX": MPI.LOR,
    "BAND": MPI.LAND,
    "BOR": MPI.LOR,
    "BXOR": MPI.LXOR,
}
_OF_SHORT_FLOATS: dict[str, _Reduce] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}
"""Reductions of floats of 16 bits, which MPI does not have."""
_OF_COMPLEX = ("SUM", "AVG", "PRODUCT")


def message(tensor: torch.Tensor, datatype: MPI.Datatype | None = None, ranks: int = 1) -> list[Any]:
    """Return a contiguous host tensor's memory as a message.

    Args:
        tensor: The tensor.
        datatype: Of its elements; None to move them unchanged.
        ranks: Number of equal parts, one for each rank.
    """
    memory = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return [memory, tensor.numel() // ranks, datatype or moved(tensor)]


def moved(tensor: torch.Tensor) -> MPI.Datatype:
    """The datatype that moves the tensor's elements unchanged."""
    return _BY_SIZE[tensor.element_size()]


def check(tensors: list[torch.Tensor], sparse: bool = False) -> None:
    """Refuse tensors that MPI cannot read.

    Raises:
        MpiError: A tensor is not in the host's memory, or it is sparse.
    """
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise MpiError(
                f"ddpobs_mpi takes tensors of the host, not of {tensor.device}: copy the tensor to the CPU, or use "
                'init_process_group("nccl", init_method="mpi://"), which takes only the rendezvous from MPI'
            )
        if tensor.layout != torch.strided and not sparse:
            raise MpiError(f"ddpobs_mpi: only all_reduce takes sparse tensors, got {tensor.layout}")


def name_of_reduction(op: Any) -> str:
    """The name of torch's reduction, such as `SUM`.

    Raises:
        MpiError: MPI has no such reduction.
    """
    for name in _REDUCTIONS:
        if op == getattr(dist.ReduceOp, name):
            return name
    raise MpiError(f"ddpobs_mpi has the reductions {', '.join(_REDUCTIONS)}, not {op}")


def reduction(name: str, dtype: torch.dtype) -> tuple[MPI.Op, MPI.Datatype]:
    """Return the operation and the datatype of a reduction.

    Raises:
        MpiError: There is no such reduction of that dtype.
    """
    if dtype in (torch.float16, torch.bfloat16) and name in _OF_SHORT_FLOATS:
        return _of_short_floats(name, dtype), MPI.UINT16_T
    datatype = _NUMBERS.get(dtype)
    known = _OF_BOOL if dtype == torch.bool else _REDUCTIONS
    bitwise = name.startswith("B") and (dtype.is_floating_point or dtype.is_complex)
    if datatype is None or name not in known or bitwise or (dtype.is_complex and name not in _OF_COMPLEX):
        raise MpiError(f"ddpobs_mpi has no reduction {name} of {dtype}")
    return known[name], datatype


@cache
def _of_short_floats(name: str, dtype: torch.dtype) -> MPI.Op:
    reduce = _OF_SHORT_FLOATS[name]

    def function(incoming: Any, result: Any, _datatype: MPI.Datatype) -> None:
        ours = torch.frombuffer(result, dtype=dtype)
        reduce(torch.frombuffer(incoming, dtype=dtype), ours, out=ours)

    return MPI.Op.Create(function, commute=True)
