"""Several process groups in turn, each with its own connections (arXiv 2006.15704, section 5.4).

One group leaves a fast link unfilled where a connection, or the thread behind it, is the limit.
"""

from __future__ import annotations

import torch.distributed as dist

from ddpobs.buckets import Bucket
from ddpobs.comm.all_reduce import AllReduce
from ddpobs.comm.face import Pending, Way
from ddpobs.comm.stages import another_group


class RoundRobin:
    """Bucket i goes to group i mod k, whatever is done with it there.

    Args:
        group: The first of them.
        way: What is done with a bucket in its group.
        groups: How many there are, this one included.
    """

    def __init__(self, group: dist.ProcessGroup, way: Way = AllReduce, groups: int = 2) -> None:
        self._group, self._way, self._groups = group, way, groups
        first = way(group)
        self._comms = [first]
        self._others: list[dist.ProcessGroup] = []
        self.name = f"round_robin:{groups}" + ("" if way is AllReduce else f":{first.name}")
        self.divides, self.carries_nan = first.divides, first.carries_nan

    def launch(self, bucket: Bucket, last: bool) -> Pending:
        """Start it in its turn."""
        if not self._others:  # Not before: a module may be copied on one rank alone.
            self._others = [another_group(self._group) for _ in range(self._groups - 1)]
            self._comms += map(self._way, self._others)
        return self._comms[bucket.index % self._groups].launch(bucket, last)

    def close(self) -> None:
        """End what each does, and the groups that were made for it."""
        for comm in self._comms:
            comm.close()
        for group in self._others:
            dist.destroy_process_group(group)
