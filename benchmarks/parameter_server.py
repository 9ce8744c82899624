"""The baselines that all-reduce is compared with: ranks that collect the sum and send it back to all."""

from __future__ import annotations

import torch
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


class Servers(ParameterServer):
    """Send each bucket to its server, which adds and sends the sum back to each rank: no link relays for another.

    Args:
        group: The process group.
        on_each_rank: Every rank serves its share of the buckets; otherwise the first rank serves all.
    """

    name = "servers"

    def __init__(self, group: dist.ProcessGroup, *, on_each_rank: bool = False) -> None:
        super().__init__(group)
        self._servers = group.size() if on_each_rank else 1

    @override
    def launch_dense(self, bucket: Bucket, last: bool) -> Pending:
        buffer, server = bucket.buffer, bucket.index % self._servers
        serves = self._group.rank() == server
        parts = [torch.empty_like(buffer) for _ in range(self._ranks)] if serves else None
        gathered = dist.gather(buffer, parts, group=self._group, group_dst=server, async_op=True)

        def stages(stage_group: dist.ProcessGroup) -> None:
            wait_for(gathered)
            if parts is not None:
                buffer.copy_(torch.stack(parts).sum(0))
            sums = [buffer] * self._ranks if serves else None
            wait_for(dist.scatter(buffer, sums, group=stage_group, group_src=server, async_op=True))

        return self._stages.run(stages, buffer.device)
