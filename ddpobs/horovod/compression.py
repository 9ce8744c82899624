"""Compressors: the form in which a gradient travels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddpobs.buckets.bucket import Bucket
from ddpobs.comm.base import CommFactory, FuturePending, Pending
from ddpobs.comm.strategies.all_reduce import AllReduce
from ddpobs.comm.strategies.cast import Fp16
from ddpobs.torch_seam.collectives import all_reduce


class Compressor:
    """Base of Horovod's compressors; users may write their own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor that travels, and the context that `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its original form, up to the loss of precision."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Tensors travel unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor itself."""
        return tensor


class FP16Compressor(Compressor):
    """Floating-point numbers travel in 16 bits."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor in float16, and its dtype."""
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its former dtype."""
        return tensor.to(ctx)


class Compression:
    """The built-in compressors."""

    none = NoneCompressor
    fp16 = FP16Compressor


def factory_of(compressor: type[Compressor] | Compressor) -> CommFactory:
    """Return the factory of the communication strategy that applies the compressor."""
    if compressor is NoneCompressor:
        return AllReduce
    if compressor is FP16Compressor:
        return Fp16
    return partial(_Compressed, compressor=compressor)


class _Compressed:
    """All-reduce of a bucket's flat buffer as a user's compressor changes it."""

    divides = True
    carries_nan = False

    def __init__(self, group: dist.ProcessGroup, compressor: type[Compressor] | Compressor) -> None:
        self._group, self._compressor = group, compressor
        kind = compressor if isinstance(compressor, type) else type(compressor)
        self.name = kind.__name__

    def launch(self, bucket: Bucket, last: bool) -> Pending:
        """Compress the buffer and start its all-reduce."""
        small, context = self._compressor.compress(bucket.buffer)
        return FuturePending(
            all_reduce(self._group, [small]).get_future().then(self._decompress_into(bucket, small, context))
        )

    def _decompress_into(
        self, bucket: Bucket, small: torch.Tensor, context: Any
    ) -> Callable[[torch.futures.Future[Any]], torch.Tensor]:
        def decompress(reduced: torch.futures.Future[Any]) -> torch.Tensor:
            reduced.value()  # Raises if the exchange failed.
            return bucket.buffer.copy_(self._compressor.decompress(small, context))

        return decompress
