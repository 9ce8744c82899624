"""What travels in the place of a gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddpobs.buckets.bucket import Bucket
from ddpobs.comm import AllReduce, Fp16, FuturePending, Pending
from ddpobs.comm.base import CommFactory
from ddpobs.torch_seam.collectives import all_reduce


class Compressor:
    """Base of Horovod's compressors; users may write their own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What travels, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor as it was, up to what was lost."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Nothing is changed."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor itself."""
        return tensor


class FP16Compressor(Compressor):
    """Floating-point numbers travel in 16 bits."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """In float16, with the dtype it had."""
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """In the dtype it had."""
        return tensor.to(ctx)


class Compression:
    """Those that there are."""

    none = NoneCompressor
    fp16 = FP16Compressor


def way_of(compressor: type[Compressor] | Compressor) -> CommFactory:
    """What is done with a full bucket under that compressor."""
    if compressor is NoneCompressor:
        return AllReduce
    if compressor is FP16Compressor:
        return Fp16
    return partial(_Compressed, compressor=compressor)


class _Compressed:
    """All-reduce of what a user's compressor makes of a bucket, which it sees flat."""

    divides = True
    carries_nan = False

    def __init__(self, group: dist.ProcessGroup, compressor: type[Compressor] | Compressor) -> None:
        self._group, self._compressor = group, compressor
        kind = compressor if isinstance(compressor, type) else type(compressor)
        self.name = kind.__name__

    def launch(self, bucket: Bucket, last: bool) -> Pending:
        """Compress and start."""
        small, context = self._compressor.compress(bucket.buffer)
        return FuturePending(all_reduce(self._group, [small]).get_future().then(self._back(bucket, small, context)))

    def _back(
        self, bucket: Bucket, small: torch.Tensor, context: Any
    ) -> Callable[[torch.futures.Future[Any]], torch.Tensor]:
        def back(reduced: torch.futures.Future[Any]) -> torch.Tensor:
            reduced.value()  # Raises where the exchange failed.
            return bucket.buffer.copy_(self._compressor.decompress(small, context))

        return back
