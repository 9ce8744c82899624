"""Assign parameters to buckets by size, dtype and device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size


def assign(
    parameters: Sequence[torch.nn.Parameter], limits_bytes: Sequence[int], expect_sparse: Sequence[bool]
) -> list[list[int]]:
    """Indices of the parameters of each bucket, in launch order: the last-defined parameters first.

    Closed when the size reaches the limit, keyed by dtype and device, as torch's DDP does it.

    Args:
        parameters: In the order of the module.
        limits_bytes: Of the first bucket, the second, ...; the last one holds for the rest.
        expect_sparse: Which parameters get sparse gradients, and so a bucket each.
    """
    indices, _ = _compute_bucket_assignment_by_size(list(parameters), list(limits_bytes), list(expect_sparse))
    return list(reversed(indices))


def assign_in_order(
    parameters: Sequence[torch.nn.Parameter],
    order: Sequence[int],
    limits_bytes: Sequence[int],
    expect_sparse: Sequence[bool],
) -> list[list[int]]:
    """The same, for parameters in the order in which their gradients came."""
    ordered: list[torch.Tensor] = [parameters[index] for index in order]
    indices, _ = _compute_bucket_assignment_by_size(ordered, list(limits_bytes), list(expect_sparse), list(order))
    return list(indices)
