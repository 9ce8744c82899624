"""Base of strategies for dense buckets; the plain all-reduce takes the others."""

from __future__ import annotations

import torch.distributed as dist

from ddpobs.buckets.bucket import Bucket
from ddpobs.comm.base import Pending
from ddpobs.comm.strategies.all_reduce import AllReduce


class DenseOnly:
    """Base of strategies for dense floating-point buckets; all other buckets go through the plain all-reduce.

    A subclass sets `name` and implements `launch_dense`.

    Args:
        group: The process group.
    """

    name: str
    divides = True
    carries_nan = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._ranks = group, group.size()
        self._plain = AllReduce(group)

    def handles(self, bucket: Bucket) -> bool:
        """Whether `launch_dense` takes the bucket."""
        return not bucket.sparse and bucket.buffer.is_floating_point()

    def launch(self, bucket: Bucket, last: bool) -> Pending:
        """Start the strategy's exchange, or the plain all-reduce."""
        if self.handles(bucket):
            return self.launch_dense(bucket, last)
        if not self.divides:
            _divide(bucket, self._ranks)
        return self._plain.launch(bucket, last)

    def launch_dense(self, bucket: Bucket, last: bool) -> Pending:
        """Start the exchange of a bucket that `handles` accepts; the arguments are `launch`'s."""
        raise NotImplementedError


def _divide(bucket: Bucket, ranks: int) -> None:
    if not bucket.sparse:
        bucket.buffer.div_(ranks)
        return
    gradient = bucket.parameters[0].grad
    assert gradient is not None
    bucket.parameters[0].grad = gradient / ranks
