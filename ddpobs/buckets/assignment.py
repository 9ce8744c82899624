"""Assign parameters to buckets by size, dtype and device."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

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


def separate(
    buckets: Sequence[Sequence[int]],
    groups: Sequence[Hashable | None],
    sizes_bytes: Sequence[int],
    least_bytes: int,
) -> list[list[int]]:
    """Give parameters that are left out together a bucket of their own, so that it need not be reduced then.

    Args:
        buckets: Indices of each bucket's parameters, in launch order.
        groups: By parameter, its group; None without one.
        sizes_bytes: By parameter.
        least_bytes: Smallest size of a group's part of a bucket that becomes a bucket.
    """
    separated: list[list[int]] = []
    for bucket in buckets:
        parts: dict[Hashable, list[int]] = {}
        for member in bucket:
            parts.setdefault(groups[member], []).append(member)
        rest = parts.pop(None, [])
        for group, part in list(parts.items()):
            if sum(sizes_bytes[member] for member in part) < least_bytes:
                rest += parts.pop(group)
        ready = {member: place for place, member in enumerate(bucket)}
        cut = [sorted(part, key=ready.__getitem__) for part in (*parts.values(), rest) if part]
        separated += sorted(cut, key=lambda part: ready[part[-1]])
    return separated
