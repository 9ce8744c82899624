"""Only the largest gradients travel; the rest is added to the next step's (error feedback, arXiv 1809.07599)."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from ddpobs.buckets.bucket import Bucket
from ddpobs.comm.all_reduce import AllReduce
from ddpobs.comm.base import FuturePending, Pending
from ddpobs.torch_seam.collectives import all_gather


class TopK:
    """All-gather of each rank's largest elements with their places, summed on every rank in the same order.

    Traffic grows with the number of ranks, as every rank's choice is another: (n - 1) · 8 · density bytes an element.

    Args:
        group: The process group.
        density: Share of a bucket's elements that travel, above 0 and at most 1.
    """

    divides = True
    carries_nan = True

    def __init__(self, group: dist.ProcessGroup, density: float = 0.01) -> None:
        self.name = f"topk:{density:g}"
        self._group, self._ranks, self._density = group, group.size(), density
        self._plain = AllReduce(group)

    def launch(self, bucket: Bucket, last: bool) -> Pending:
        """Choose, and start the all-gather."""
        if bucket.sparse or not bucket.buffer.is_floating_point():
            return self._plain.launch(bucket, last)
        buffer = bucket.buffer
        if bucket.residual is None:
            bucket.residual = torch.zeros_like(buffer)
        owed = bucket.residual.add_(buffer)
        count = math.ceil(buffer.numel() * self._density)
        places = owed.abs().topk(count, sorted=False).indices
        mine = torch.cat([places.to(torch.int32), owed[places].to(torch.float32).view(torch.int32)])
        owed[places] = 0
        owed.nan_to_num_(0, 0, 0)  # An overflow, which is told by what travels, is not to come back for k at a time.
        everyone = mine.new_empty(self._ranks * 2 * count)
        work = all_gather(self._group, everyone, mine)

        def add_up(gathered: torch.futures.Future[object]) -> torch.Tensor:
            gathered.value()  # Raises where the exchange failed.
            buffer.zero_()
            for chosen in everyone.view(self._ranks, 2, count):
                buffer.index_add_(0, chosen[0], chosen[1].view(torch.float32).to(buffer.dtype))
            return buffer

        return FuturePending(work.get_future().then(add_up))
