"""The layout: which bucket holds each parameter, and in which slot.

It is built at construction, and once more when the order in which gradients become ready is known.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence

import torch
import torch.distributed as dist

from ddpobs import wire
from ddpobs.buckets import assignment
from ddpobs.buckets import bucket as bucketing
from ddpobs.buckets.bucket import Bucket
from ddpobs.torch_seam.collectives import broadcast_from_first, values_of_all, wait_for
from ddpobs.torch_seam.modes import unseen

_RELEASE_S = 0.1
"""Seconds for which a thread of the process group may still hold a buffer after its wait has returned."""

_GROUP_BYTES = 2**20
"""Smallest bucket of a group. At 10 Gbit/s it takes about 1 ms, and a further collective about 0.1 ms."""


class Layout:
    """The buckets of a set of parameters. Its lists are changed in place, so that every holder of a list sees changes.

    Args:
        parameters: The parameters that require a gradient, in the module's order.
        names: Their names.
        expect_sparse: By parameter, whether its gradient is sparse.
        as_views: Autograd may see gradients as views of the buckets.
        groups: By name, the group of a parameter that some backward passes leave out together with others. Once the
            order of gradients is known, a large group has buckets of its own.

    Attributes:
        parameters: As given.
        names: As given.
        expect_sparse: As given.
        buckets: In launch order.
        bucket_of: By parameter, its bucket.
        index_in_bucket: By parameter, its slot there.
        index_of: By `id` of a parameter, its index.
        flat_index: By parameter, its position among all, bucket after bucket.
        dtype: Dtype of the reduction if it is not the parameters' own; else None.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        expect_sparse: Sequence[bool],
        as_views: bool,
        groups: Mapping[str, Hashable] | None = None,
    ) -> None:
        self._groups = groups or {}
        self.parameters, self.names, self.expect_sparse = list(parameters), list(names), list(expect_sparse)
        self.as_views = as_views
        self.dtype: torch.dtype | None = None
        self.buckets: list[Bucket] = []
        self.bucket_of: list[Bucket] = []
        self.index_in_bucket: list[int] = []
        self.index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self.flat_index: list[int] = []

    def build(self, assignment: Sequence[Sequence[int]]) -> None:
        """Build the buckets of an assignment. Gradients that are views of the old buckets move to the new ones.

        Args:
            assignment: Indices of each bucket's parameters, in launch order.
        """
        rebuilds = bool(self.buckets)
        if not any(bucket.holds_gradients or bucket.residual is not None for bucket in self.buckets):
            self.buckets.clear()  # Their memory is free before the new ones take theirs.
            self.bucket_of.clear()
        buckets = bucketing.build(self.parameters, assignment, self.expect_sparse, self.as_views)
        flat = [(bucket, slot, member) for bucket in buckets for slot, member in enumerate(bucket.members)]
        if self.dtype is not None:
            for bucket in buckets:
                bucket.set_dtype(self.dtype)
        if rebuilds:
            for bucket, slot, member in flat:
                self._move(member, bucket, slot)
        self.buckets[:] = buckets
        positions = {member: (bucket, slot, index) for index, (bucket, slot, member) in enumerate(flat)}
        columns = zip(*(positions[member] for member in range(len(self.parameters))), strict=True)
        self.bucket_of[:], self.index_in_bucket[:], self.flat_index[:] = map(list, columns)

    def append(
        self,
        buckets: Sequence[Bucket],
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        expect_sparse: Sequence[bool],
    ) -> None:
        """Add parameters with their buckets, whose members count on from the parameters here."""
        flat = [(bucket, slot, member) for bucket in buckets for slot, member in enumerate(bucket.members)]
        first = len(self.parameters)
        self.index_of.update({id(parameter): first + index for index, parameter in enumerate(parameters)})
        self.parameters += parameters
        self.names += names
        self.expect_sparse += expect_sparse
        self.buckets += buckets
        positions = {member: (bucket, slot, first + index) for index, (bucket, slot, member) in enumerate(flat)}
        for member in range(first, len(self.parameters)):
            bucket, slot, index = positions[member]
            self.bucket_of.append(bucket)
            self.index_in_bucket.append(slot)
            self.flat_index.append(index)

    def _move(self, member: int, bucket: Bucket, slot: int) -> None:
        gradient, old_view = self.parameters[member].grad, None
        if self.bucket_of:
            old_bucket, old_slot = self.bucket_of[member], self.index_in_bucket[member]
            old_view = None if old_bucket.sparse else old_bucket.views[old_slot]
            if old_bucket.residual is not None:
                bucket.carry_residual(slot, old_bucket, old_slot)
        if gradient is None or bucket.sparse or not bucket.grads_are_views:
            return
        # With gradient_as_bucket_view torch turns every present gradient into a view, and it divides views otherwise
        # than other gradients.
        if self.as_views or gradient is old_view:
            bucket.memory.take_over(slot, gradient)

    def rebuild_in_order(self, arrivals: Sequence[int], limits_bytes: Sequence[int], group: dist.ProcessGroup) -> bool:
        """Build the buckets in the order in which gradients became ready on rank 0. A collective call.

        Args:
            arrivals: Indices of the parameters as their gradients arrived on this rank, with repetitions.
            limits_bytes: Limit of the first bucket, the second, ...; the last limit holds for all further buckets.
            group: The process group, which agrees on the order.

        Returns:
            False if the buckets stay as they are: on some rank another tensor shares the memory of a present gradient.
        """
        last_arrivals = list(dict.fromkeys(reversed(arrivals)))[::-1]
        absent = sorted(set(range(len(self.parameters))) - set(last_arrivals))
        order = torch.tensor(last_arrivals + absent, dtype=torch.int64, device=self.parameters[0].device)
        wait_for(broadcast_from_first(group, [order]))
        buckets = assignment.assign_in_order(self.parameters, order.tolist(), limits_bytes, self.expect_sparse)
        if self._groups:
            groups = [self._groups.get(name) for name in self.names]
            sizes = [parameter.numel() * parameter.element_size() for parameter in self.parameters]
            buckets = assignment.separate(buckets, groups, sizes, min(_GROUP_BYTES, *limits_bytes))
        return self.rebuild(buckets, group)

    def rebuild(self, assignment: Sequence[Sequence[int]], group: dist.ProcessGroup) -> bool:
        """Build these buckets, the same on every rank. A collective call; returns as `rebuild_in_order`."""
        shared = torch.tensor([self._shares_memory()], dtype=torch.int64, device=self.parameters[0].device)
        # Torch's DDP makes two collectives in a rebuild, and neither is an all-reduce.
        if any(torch.cat(values_of_all(group, shared)).tolist()):
            return False
        self.build(assignment)
        return True

    def _shares_memory(self) -> bool:
        """Whether another tensor shares the memory of a present gradient, as after `data`, and may be used again."""
        deadline = time.monotonic() + _RELEASE_S
        while shared := not self.as_views and any(
            bucket.memory.is_shared and bucket.holds_gradients for bucket in self.buckets
        ):
            if time.monotonic() > deadline:
                break
            time.sleep(_RELEASE_S / 100)
        return shared

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Reduce in `dtype` from now on, instead of the parameters' own."""
        self.dtype = dtype
        for bucket in self.buckets:
            bucket.set_dtype(dtype)

    @unseen
    def describe(self) -> list[wire.Bucket]:
        """The buckets in their wire form."""
        return [bucket.describe(self.names) for bucket in self.buckets]
