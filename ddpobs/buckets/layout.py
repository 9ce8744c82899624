"""Which bucket each parameter is in, and where: laid at construction, and anew once the order of gradients is known."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddpobs import wire
from ddpobs.buckets import assignment
from ddpobs.buckets import bucket as bucketing
from ddpobs.buckets.bucket import Bucket
from ddpobs.torch_seam.collectives import all_reduce, broadcast_from_first, wait_for

_LATE_S = 0.1
"""How long a thread of the process group's may hold a buffer that was waited for."""


class Layout:
    """The buckets of some parameters. Its lists are changed in place, so that whoever holds one sees the latest.

    Args:
        parameters: Those that require a gradient, in the module's order.
        names: Theirs.
        expect_sparse: Which of them get sparse gradients.
        as_views: Gradients are views to autograd too.

    Attributes:
        buckets: In launch order.
        bucket_of: Each parameter's bucket.
        place_of: Each parameter's place in its bucket.
        position_of: Each parameter's place among all, bucket after bucket.
        dtype: What is reduced in, where that is not the parameters' own.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        expect_sparse: Sequence[bool],
        as_views: bool,
    ) -> None:
        self._parameters, self._names = parameters, names
        self._expect_sparse, self._as_views = expect_sparse, as_views
        self.dtype: torch.dtype | None = None
        self.buckets: list[Bucket] = []
        self.bucket_of: list[Bucket] = []
        self.index_in_bucket: list[int] = []
        self.flat_index: list[int] = []

    def build(self, assignment: Sequence[Sequence[int]]) -> None:
        """Build the buckets of an assignment; gradients that are views of older ones move over.

        Args:
            assignment: Indices of each bucket's parameters, in launch order.
        """
        laid = bucketing.build(self._parameters, assignment, self._expect_sparse, self._as_views)
        flat = [(bucket, place, member) for bucket in laid for place, member in enumerate(bucket.members)]
        if self.dtype is not None:
            for bucket in laid:
                bucket.set_dtype(self.dtype)
        if self.buckets:
            for bucket, place, member in flat:
                self._move(member, bucket, place)
        self.buckets[:] = laid
        where = {member: (bucket, place, position) for position, (bucket, place, member) in enumerate(flat)}
        found = [where[member] for member in range(len(self._parameters))]
        self.bucket_of[:], self.index_in_bucket[:], self.flat_index[:] = map(list, zip(*found, strict=True))

    def _move(self, member: int, bucket: Bucket, place: int) -> None:
        parameter, older, older_place = self._parameters[member], self.bucket_of[member], self.index_in_bucket[member]
        if older.residual is not None:
            bucket.carry_residual(place, older, older_place)
        gradient = parameter.grad
        if gradient is None or bucket.sparse or not bucket.grads_are_views:
            return
        # Under the flag torch makes a view of every gradient that is there, and divides views otherwise than others.
        if self._as_views or gradient is older.views[older_place]:
            bucket.take_over(place, gradient)

    def rebuild_in_order(self, came: Sequence[int], limits_bytes: Sequence[int], group: dist.ProcessGroup) -> bool:
        """Build them anew in the order in which gradients came last on rank 0. Every rank calls it alike.

        Args:
            came: Indices of the parameters as their gradients came here, with repetitions.
            limits_bytes: Of the first bucket, the second, ...; the last one holds for the rest.
            group: The process group, which agrees on the order.

        Returns:
            False where they stay as they are: on some rank another tensor has the memory of a gradient that is there.
        """
        last = list(dict.fromkeys(reversed(came)))[::-1]
        rest = sorted(set(range(len(self._parameters))) - set(last))
        agreed = torch.tensor(last + rest, dtype=torch.int64, device=self._parameters[0].device)
        shared = agreed.new_tensor(self._shared())
        wait_for(broadcast_from_first(group, [agreed]))
        wait_for(all_reduce(group, [shared]))
        if shared.item():
            return False
        self.build(assignment.assign_in_order(self._parameters, agreed.tolist(), limits_bytes, self._expect_sparse))
        return True

    def _shared(self) -> bool:
        """Whether memory of a gradient that is there has another tensor too, as by `data`, which may be used again."""
        ends = time.monotonic() + _LATE_S
        while shared := not self._as_views and any(bucket.shared and bucket.holds_gradients for bucket in self.buckets):
            if time.monotonic() > ends:
                break
            time.sleep(_LATE_S / 100)
        return shared

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Reduce in `dtype` from now on, whatever the parameters' own is."""
        self.dtype = dtype
        for bucket in self.buckets:
            bucket.set_dtype(dtype)

    def describe(self) -> list[wire.Bucket]:
        """The buckets as they travel."""
        return [bucket.describe(self._names) for bucket in self.buckets]
