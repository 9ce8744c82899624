"""What all-reduce is measured against: one rank gathers the sum and sends it back to all."""

from __future__ import annotations

import torch.distributed as dist

from ddpobs.buckets.bucket import Bucket
from ddpobs.comm.all_reduce import AllReduce
from ddpobs.comm.base import Pending
from ddpobs.comm.multi_stage import Stages
from ddpobs.torch_seam.collectives import wait_for


class ParameterServer:
    """Reduce to the group's first rank, then broadcast from it: its link carries everyone's bytes, twice."""

    name = "parameter_server"
    divides = True
    carries_nan = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._plain = AllReduce(group)
        self._stages = Stages(group)

    def launch(self, bucket: Bucket, last: bool) -> Pending:
        """Start the reduction; the broadcast follows from the stages' thread."""
        if bucket.sparse:
            return self._plain.launch(bucket, last)
        buffer = bucket.buffer
        reduced = dist.reduce(buffer, group=self._group, group_dst=0, async_op=True)

        def stages(own: dist.ProcessGroup) -> None:
            wait_for(reduced)
            wait_for(dist.broadcast(buffer, group=own, group_src=0, async_op=True))

        return self._stages.run(stages, buffer.device)
