"""Several process groups in turn, each with its own connections (arXiv 2006.15704, section 5.4).

If a connection, or the thread that serves it, is the limit, one group cannot fill a fast link.
"""

from __future__ import annotations

import torch.distributed as dist

from ddpobs.buckets.bucket import Bucket
from ddpobs.comm.base import CommFactory, Pending
from ddpobs.comm.side_groups import get_side_group
from ddpobs.comm.strategies.all_reduce import AllReduce


class RoundRobin:
    """Bucket i goes to group i mod k, with any strategy there.

    Args:
        group: The first group.
        factory: Creates the strategy for each group.
        groups: Number of groups, including the first.
    """

    def __init__(self, group: dist.ProcessGroup, factory: CommFactory = AllReduce, groups: int = 2) -> None:
        self._group, self._factory, self._groups = group, factory, groups
        first = factory(group)
        self._comms = [first]
        self.name = f"round_robin:{groups}" + ("" if factory is AllReduce else f":{first.name}")
        self.divides, self.carries_nan = first.divides, first.carries_nan

    def launch(self, bucket: Bucket, last: bool) -> Pending:
        """Start the exchange on the bucket's group. The first launch creates the other groups."""
        if len(self._comms) < self._groups:  # Not in the constructor: a module may be copied on one rank alone.
            device = bucket.buffer.device
            side_groups = [get_side_group(self._group, device, index) for index in range(1, self._groups)]
            self._comms += map(self._factory, side_groups)
        return self._comms[bucket.index % self._groups].launch(bucket, last)
