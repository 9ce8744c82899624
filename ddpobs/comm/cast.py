"""Half the bytes: gradients travel, and are summed, in 16 bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from ddpobs.buckets.bucket import Bucket
from ddpobs.comm.all_reduce import AllReduce
from ddpobs.comm.base import FuturePending, Pending
from ddpobs.torch_seam.collectives import all_reduce


class _Cast:
    """All-reduce in a narrower dtype. A bucket that is no wider, or sparse, is reduced as it is."""

    divides = True
    carries_nan = True
    name: str
    dtype: torch.dtype

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._plain = AllReduce(group)

    def launch(self, bucket: Bucket, last: bool) -> Pending:
        """Cast, start the all-reduce, and cast back as soon as it is done."""
        buffer = bucket.buffer
        if bucket.sparse or not buffer.is_floating_point() or buffer.element_size() <= self.dtype.itemsize:
            return self._plain.launch(bucket, last)
        narrow = buffer.to(self.dtype)
        return FuturePending(all_reduce(self._group, [narrow]).get_future().then(_into(buffer, narrow)))


def _into(buffer: torch.Tensor, narrow: torch.Tensor) -> Callable[[torch.futures.Future[object]], torch.Tensor]:
    def widen(reduced: torch.futures.Future[object]) -> torch.Tensor:
        reduced.value()  # Raises where the exchange failed.
        return buffer.copy_(narrow)

    return widen


class Fp16(_Cast):
    """In float16: 10 bits of fraction; sums above 65504 overflow to infinity, which GradScaler looks for."""

    name = "fp16"
    dtype = torch.float16


class Bf16(_Cast):
    """In bfloat16: float32's range with 7 bits of fraction."""

    name = "bf16"
    dtype = torch.bfloat16
