"""Options of a collective in both of torch's forms: an object, or arguments of their own.

Torch overloads the methods of a process group: `allreduce([tensor], options)`, and short forms such as
`allreduce(tensor, op)`. A class in Python gets both. Torch's DDP uses a short form under `join`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class Options:
    """The options that a collective may have.

    Attributes:
        op: The reduction.
        root: Rank of the root in the group.
        timeout: Zero or less for the group's.
    """

    op: Any = dist.ReduceOp.SUM
    root: int = 0
    timeout: timedelta = timedelta(0)


def options_of(given: Sequence[Any], named: Mapping[str, Any]) -> Options:
    """Return the options among a call's further arguments, which differ in type.

    Args:
        given: Positional arguments: an options object of torch's, an operation, a root, a timeout, or None.
        named: Keyword arguments.
    """
    options = Options()
    for value in (*given, *named.values()):
        if isinstance(value, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
            options.op = value
        elif isinstance(value, timedelta):
            options.timeout = value
        elif isinstance(value, int):
            options.root = value
        elif value is not None:
            options.op = getattr(value, "reduceOp", options.op)
            options.root = getattr(value, "rootRank", options.root)
            options.timeout = getattr(value, "timeout", options.timeout)
    return options


def listed(tensors: Any) -> list[Any]:
    """The tensors as a list; the short form has a single tensor. A tensor is a sequence too: of its rows."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def nested(tensors: Any) -> list[list[Any]]:
    """The lists of tensors; the short form has a single list."""
    lists = list(tensors)
    return [lists] if lists and isinstance(lists[0], torch.Tensor) else lists
