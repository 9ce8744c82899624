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
        self._others = [another_group(group) for _ in range(groups - 1)]
        self._comms = [way(each) for each in (group, *self._others)]
        first = self._comms[0]
        self.name = f"round_robin:{groups}" + ("" if way is AllReduce else f":{first.name}")
        self.divides, self.carries_nan = first.divides, first.carries_nan

    def launch(self, bucket: Bucket, last: bool) -> Pending:
        """Start it in its turn."""
        return self._comms[bucket.index % len(self._comms)].launch(bucket, last)

    def close(self) -> None:
        """End what each does, and the groups that were made for it."""
        for comm in self._comms:
            comm.close()
        for group in self._others:
            dist.destroy_process_group(group)
