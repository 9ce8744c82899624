"""Only the largest gradients travel; the rest is added to the next step's (error feedback, arXiv 1809.07599)."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from typing_extensions import override

from ddpobs.buckets.bucket import Bucket
from ddpobs.comm.base import FuturePending, Pending
from ddpobs.comm.dense_only import DenseOnly
from ddpobs.comm.strategy import Argument, Strategy
from ddpobs.torch_seam.collectives import all_gather


class TopK(DenseOnly):
    """All-gather of each rank's largest elements with their indices, summed on every rank in the same order.

    Traffic grows with the number of ranks, because each rank chooses other elements: (n - 1) · 8 · density bytes per
    element.

    Args:
        group: The process group.
        density: Share of a bucket's elements that travel, above 0 and at most 1.
    """

    def __init__(self, group: dist.ProcessGroup, density: float = 0.01) -> None:
        super().__init__(group)
        self.name = f"topk:{density:g}"
        self._density = density

    @override
    def launch_dense(self, bucket: Bucket, last: bool) -> Pending:
        buffer = bucket.buffer
        if bucket.residual is None:
            bucket.residual = torch.zeros_like(buffer)
        residual = bucket.residual.add_(buffer)
        count = math.ceil(buffer.numel() * self._density)
        indices = residual.abs().topk(count, sorted=False).indices
        local = torch.cat([indices.to(torch.int32), residual[indices].to(torch.float32).view(torch.int32)])
        residual[indices] = 0
        # An overflow is in the elements that travel. Kept in the residual it would return, k elements in each step.
        residual.nan_to_num_(0, 0, 0)
        gathered = local.new_empty(self._ranks * 2 * count)
        work = all_gather(self._group, gathered, local)

        def add_up(completed: torch.futures.Future[object]) -> torch.Tensor:
            completed.value()  # Raises if the exchange failed.
            buffer.zero_()
            for chosen in gathered.view(self._ranks, 2, count):
                buffer.index_add_(0, chosen[0], chosen[1].view(torch.float32).to(buffer.dtype))
            return buffer

        return FuturePending(work.get_future().then(add_up))


_DENSITY = Argument("density", float, lambda density: 0 < density <= 1, "above 0, at most 1")
STRATEGIES = (Strategy("topk", TopK, _DENSITY),)
