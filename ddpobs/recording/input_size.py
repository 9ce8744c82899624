"""Size of a forward's inputs: the work of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch

from ddpobs.steps.raw_step import NO_INPUT, InputSize
from ddpobs.torch_seam.modes import unseen

_MAX_TENSORS = 64
"""Tensors that are measured; inputs with more have an unknown number of elements."""
_MAX_DEPTH = 8


@unseen
def input_size(*inputs: Any) -> InputSize:
    """Measure the tensors among the inputs, also inside of lists, tuples and mappings. Never raises."""
    try:
        return _plain_size(inputs) or _sum(inputs)
    except Exception:  # Any object may be an input, such as a mapping that fails.
        return NO_INPUT


def _plain_size(inputs: tuple[Any, ...]) -> InputSize | None:
    """Measure inputs that are plain tensors, in the fewest operations; None for any others."""
    rows = elements = longest = 0
    for tensor in inputs:
        if type(tensor) is not torch.Tensor or tensor.is_nested:
            return None
        size = 1
        for dimension, length in enumerate(tensor.shape):
            size *= length
            if not dimension:
                rows = rows or length
            elif length > longest:
                longest = length
        elements += size
    return InputSize(rows, elements, longest)


def _sum(inputs: tuple[Any, ...]) -> InputSize:
    total = NO_INPUT
    for index, tensor in enumerate(_tensors(inputs, 0)):
        if index == _MAX_TENSORS:
            return InputSize(total.rows, 0, total.longest)
        size = _measure(tensor)
        total = InputSize(total.rows or size.rows, total.elements + size.elements, max(total.longest, size.longest))
    return total


def _measure(tensor: torch.Tensor) -> InputSize:
    """Measure a tensor of any class, as far as it can be measured."""
    rows = elements = longest = 0
    with suppress(Exception):  # A subclass may have no size, and a nested tensor has no shape.
        rows = int(tensor.size(0)) if tensor.dim() else 0
    with suppress(Exception):
        elements = int(tensor.numel())
        longest = max(map(int, tensor.shape[1:]), default=0)
    return InputSize(rows, elements, longest)


def _tensors(values: Iterable[Any], depth: int) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif depth < _MAX_DEPTH:
            if isinstance(value, Mapping):
                yield from _tensors(value.values(), depth + 1)
            elif isinstance(value, (list, tuple)):
                yield from _tensors(value, depth + 1)
