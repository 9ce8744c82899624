"""Assign parameters to buckets by size, dtype and device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size


def assign(
    parameters: Sequence[torch.nn.Parameter], limits_bytes: Sequence[int], expect_sparse: Sequence[bool]
) -> list[list[int]]:
    """Indices of each bucket's parameters, in launch order: the last-defined parameters first.

    A bucket is closed when its size reaches the limit. Dtypes and devices have separate buckets, as in torch's DDP.

    Args:
        parameters: In the order of the module.
        limits_bytes: Limit of the first bucket, the second, ...; the last limit holds for all further buckets.
        expect_sparse: By parameter, whether its gradient is sparse; such a parameter gets its own bucket.
    """
    indices, _ = _compute_bucket_assignment_by_size(list(parameters), list(limits_bytes), list(expect_sparse))
    return list(reversed(indices))


def assign_in_order(
    parameters: Sequence[torch.nn.Parameter],
    order: Sequence[int],
    limits_bytes: Sequence[int],
    expect_sparse: Sequence[bool],
) -> list[list[int]]:
    """The same assignment for parameters in a given order.

    Args:
        parameters: In the order of the module.
        order: Indices of the parameters, first ready gradient first.
        limits_bytes: As for `assign`.
        expect_sparse: As for `assign`.
    """
    ordered: list[torch.Tensor] = [parameters[index] for index in order]
    indices, _ = _compute_bucket_assignment_by_size(ordered, list(limits_bytes), list(expect_sparse), list(order))
    return list(indices)
