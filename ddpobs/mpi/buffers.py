"""Tensors and reductions as MPI takes them: memory, datatypes, operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ddpobs.mpi.runtime import library

_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.bool: "C_BOOL",
    # MPI has no such types: their elements travel as 16-bit integers, and torch computes the reduction.
    torch.float16: "INT16_T",
    torch.bfloat16: "INT16_T",
}
_OPERATORS = {"SUM": "SUM", "AVG": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX"}
_BITWISE = {"BAND": "BAND", "BOR": "BOR", "BXOR": "BXOR"}
_LOGICAL = {"SUM": "LOR", "MAX": "LOR", "PRODUCT": "LAND", "MIN": "LAND", "BAND": "LAND", "BOR": "LOR", "BXOR": "LXOR"}
_HALF: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.Tensor.add_,
    "AVG": torch.Tensor.add_,
    "PRODUCT": torch.Tensor.mul_,
    "MIN": lambda total, term: torch.minimum(total, term, out=total),
    "MAX": lambda total, term: torch.maximum(total, term, out=total),
}


def memory(tensor: torch.Tensor) -> list[Any]:
    """Return a contiguous tensor's bytes: address, number and type."""
    mpi = library()
    size = tensor.numel() * tensor.element_size()
    return [mpi.memory.fromaddress(tensor.data_ptr(), size), size, mpi.BYTE]


def elements(tensor: torch.Tensor) -> list[Any]:
    """Return a contiguous tensor's elements, which MPI can reduce: address, number and type.

    Raises:
        RuntimeError: MPI cannot reduce the type.
    """
    if tensor.dtype not in _TYPES:
        raise RuntimeError(f"ddpobs_mpi cannot reduce tensors of type {tensor.dtype}")
    address, _, _ = memory(tensor)
    return [address, tensor.numel(), getattr(library(), _TYPES[tensor.dtype])]


def operator(reduction: Any, dtype: torch.dtype) -> Any:
    """Return MPI's operator for a reduction of torch's.

    Raises:
        RuntimeError: The reduction does not exist for the type.
    """
    name = _name(reduction)
    half = dtype in (torch.float16, torch.bfloat16)
    if half and name in _HALF:
        return _half_operator(name, dtype)
    names = _LOGICAL if dtype == torch.bool else _OPERATORS
    if not (dtype.is_floating_point or dtype.is_complex):
        names = _BITWISE | names
    if half or name not in names or (dtype.is_complex and name in ("MIN", "MAX")):
        raise RuntimeError(f"ddpobs_mpi does not support ReduceOp.{name} for {dtype}")
    return getattr(library(), names[name])


def averages(reduction: Any) -> bool:
    """Whether the sum is to be divided by the number of ranks."""
    return _name(reduction) == "AVG"


def _name(reduction: Any) -> str:
    return str(getattr(reduction, "op", reduction).name)


@cache
def _half_operator(name: str, dtype: torch.dtype) -> Any:
    combine = _HALF[name]

    def reduce(term: Any, total: Any, _: Any) -> None:
        combine(torch.frombuffer(total, dtype=dtype), torch.frombuffer(term, dtype=dtype))

    return library().Op.Create(reduce, commute=True)
