"""A quarter of the bytes: blocks of 8-bit integers, each block with a scale of its own.

Integers with different scales cannot be summed in transit. The sum therefore has two halves, as in a ring. First each
rank receives its part of the bucket from all others and adds it up in float32. Then every rank receives all parts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from typing_extensions import override

from ddpobs.buckets.bucket import Bucket
from ddpobs.comm.base import Pending
from ddpobs.comm.dense_only import DenseOnly
from ddpobs.comm.multi_stage import Stages
from ddpobs.comm.strategy import Strategy
from ddpobs.torch_seam.collectives import all_gather, wait_for

BLOCK = 256
"""Elements that share a scale, of 4 bytes: 1.6 % more traffic, and an outlier coarsens no more than its neighbours."""


class Int8(DenseOnly):
    """Reduce-scatter and all-gather of 8-bit blocks. Values are rounded to nearest, twice, without error feedback."""

    name = "int8"

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._stages = Stages(group)

    @override
    def handles(self, bucket: Bucket) -> bool:
        return super().handles(bucket) and bool(bucket.elements)

    @override
    def launch_dense(self, bucket: Bucket, last: bool) -> Pending:
        buffer, size = bucket.buffer, bucket.buffer.numel()
        piece = -(-size // (self._ranks * BLOCK)) * BLOCK
        padded = torch.zeros(self._ranks * piece, dtype=torch.float32, device=buffer.device)
        padded[:size] = buffer
        outgoing = encode(padded.view(self._ranks, piece))
        incoming = torch.empty_like(outgoing)
        scattered = dist.all_to_all_single(incoming, outgoing, group=self._group, async_op=True)

        def stages(stage_group: dist.ProcessGroup) -> None:
            wait_for(scattered)
            part = encode(decode(incoming).sum(0, keepdim=True))
            parts = torch.empty_like(outgoing)
            wait_for(all_gather(stage_group, parts, part))
            buffer.copy_(decode(parts).view(-1)[:size])

        return self._stages.run(stages, buffer.device)


def encode(values: torch.Tensor) -> torch.Tensor:
    """Float32 rows as bytes: the scales of all blocks, then one byte for each value.

    Args:
        values: (rows, elements), elements a multiple of `BLOCK`.
    """
    rows = len(values)
    blocks = values.view(rows, -1, BLOCK)
    scales = blocks.abs().amax(2, keepdim=True).div_(127)
    whole = blocks.div(scales.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
    return torch.cat([scales.view(rows, -1).view(torch.uint8), whole.view(rows, -1).view(torch.uint8)], dim=1)


def decode(encoded: torch.Tensor) -> torch.Tensor:
    """The rows before `encode`, as (rows, elements) of float32, each off by at most half its block's scale."""
    rows, length = encoded.shape
    blocks = length // (BLOCK + 4)
    scales = encoded[:, : 4 * blocks].contiguous().view(torch.float32).view(rows, blocks, 1)
    whole = encoded[:, 4 * blocks :].contiguous().view(torch.int8).view(rows, blocks, BLOCK)
    return (whole * scales).view(rows, -1)


STRATEGIES = (Strategy("int8", Int8),)
