"""Several process groups in turn, each with its own connections (arXiv 2006.15704, section 5.4).

One group leaves a fast link unfilled where a connection, or the thread behind it, is the limit.
"""

from __future__ import annotations

import torch.distributed as dist

from ddpobs.buckets.bucket import Bucket
from ddpobs.comm.all_reduce import AllReduce
from ddpobs.comm.base import CommFactory, Pending
from ddpobs.comm.side_groups import group_beside


class RoundRobin:
    """Bucket i goes to group i mod k, whatever is done with it there.

    Args:
        group: The first of them.
        way: What is done with a bucket in its group.
        groups: How many there are, this one included.
    """

    def __init__(self, group: dist.ProcessGroup, way: CommFactory = AllReduce, groups: int = 2) -> None:
        self._group, self._way, self._groups = group, way, groups
        first = way(group)
        self._comms = [first]
        self.name = f"round_robin:{groups}" + ("" if way is AllReduce else f":{first.name}")
        self.divides, self.carries_nan = first.divides, first.carries_nan

    def launch(self, bucket: Bucket, last: bool) -> Pending:
        """Start it in its turn."""
        if len(self._comms) < self._groups:  # Not before: a module may be copied on one rank alone.
            others = [group_beside(self._group, bucket.buffer.device, place) for place in range(1, self._groups)]
            self._comms += map(self._way, others)
        return self._comms[bucket.index % self._groups].launch(bucket, last)
