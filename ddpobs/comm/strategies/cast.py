"""Half the bytes: gradients travel, and are summed, in 16 bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from typing_extensions import override

from ddpobs.buckets.bucket import Bucket
from ddpobs.comm.base import FuturePending, Pending
from ddpobs.comm.dense_only import DenseOnly
from ddpobs.comm.strategy import Strategy
from ddpobs.torch_seam.collectives import all_reduce


class _Cast(DenseOnly):
    """All-reduce in a narrower dtype. A bucket that is no wider, or sparse, is reduced as it is."""

    dtype: torch.dtype

    @override
    def handles(self, bucket: Bucket) -> bool:
        return super().handles(bucket) and bucket.buffer.element_size() > self.dtype.itemsize

    @override
    def launch_dense(self, bucket: Bucket, last: bool) -> Pending:
        buffer = bucket.buffer
        narrow = buffer.to(self.dtype)
        return FuturePending(all_reduce(self._group, [narrow]).get_future().then(_widen_into(buffer, narrow)))


def _widen_into(buffer: torch.Tensor, narrow: torch.Tensor) -> Callable[[torch.futures.Future[object]], torch.Tensor]:
    def widen(reduced: torch.futures.Future[object]) -> torch.Tensor:
        reduced.value()  # Raises if the exchange failed.
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


STRATEGIES = (Strategy("fp16", Fp16), Strategy("bf16", Bf16))
