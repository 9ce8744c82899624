"""The baseline that all-reduce is compared with: one rank gathers the sum and sends it back to all."""

from __future__ import annotations

import torch.distributed as dist
from typing_extensions import override

from ddpobs.buckets.bucket import Bucket
from ddpobs.comm.base import Pending
from ddpobs.comm.dense_only import DenseOnly
from ddpobs.comm.multi_stage import Stages
from ddpobs.torch_seam.collectives import wait_for


class ParameterServer(DenseOnly):
    """Reduce to the group's first rank, then broadcast from it: its link carries every rank's bytes, twice."""

    name = "parameter_server"

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._stages = Stages(group)

    @override
    def handles(self, bucket: Bucket) -> bool:
        return not bucket.sparse

    @override
    def launch_dense(self, bucket: Bucket, last: bool) -> Pending:
        buffer = bucket.buffer
        reduced = dist.reduce(buffer, group=self._group, group_dst=0, async_op=True)

        def stages(stage_group: dist.ProcessGroup) -> None:
            wait_for(reduced)
            wait_for(dist.broadcast(buffer, group=stage_group, group_src=0, async_op=True))

        return self._stages.run(stages, buffer.device)
