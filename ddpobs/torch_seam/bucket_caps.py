"""Sizes at which torch's DDP closes a bucket."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class BucketCaps:
    """The sizes in bytes that a module's arguments ask for.

    Attributes:
        bytes: Cap of each bucket.
        first_bytes: Cap of the first bucket, which is smaller where `bucket_cap_mb` is unset.
        listed_bytes: A cap for each bucket (`bucket_cap_mb_list`); empty if the caps above apply.
    """

    bytes: int
    first_bytes: int
    listed_bytes: tuple[int, ...]

    @classmethod
    def of(cls, ddp: DistributedDataParallel) -> BucketCaps:
        """Read the caps of a module of torch 2.11 or newer."""
        cap = ddp.bucket_bytes_cap
        smaller = dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
        first = min(smaller, cap) if ddp.bucket_bytes_cap_default else cap
        return cls(cap, first, tuple(ddp.bucket_bytes_cap_list))

    def first_step(self, *, static_graph: bool, find_unused_parameters: bool) -> list[int]:
        """Limits with which torch assigns the first step's buckets: mostly one bucket of all parameters."""
        if self.listed_bytes or (find_unused_parameters and not static_graph):
            return self.rebuilt()
        return [sys.maxsize]

    def rebuilt(self) -> list[int]:
        """Limits with which torch rebuilds the buckets after the first step; the last one holds for all others."""
        if self.listed_bytes:
            return list(self.listed_bytes)
        return [self.first_bytes, self.bytes] if self.first_bytes < self.bytes else [self.bytes]
