"""Models that FSDP2 shards, and their training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.support.distributed.compare import batch

UNITS = 3


class Blocks(nn.Module):
    """A stem, some blocks and a head; the stem and the head are the root's own."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(8, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(UNITS))
        self.head = nn.Linear(width, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        values = self.stem(inputs)
        for block in self.blocks:
            values = block(values)
        return self.head(values)  # type: ignore[no-any-return]


def sharded(model: Blocks | None = None, **options: Any) -> Any:
    """Shard each block and the root."""
    model = model or Blocks()
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train_sharded(
    model: Any, rank: int, steps: int = 4, before: Callable[[int], None] = lambda _: None
) -> list[torch.Tensor]:
    """Train some steps; return this rank's shards and their gradients.

    Args:
        model: The model.
        rank: Number of the rank, which determines its batches.
        steps: Number of steps.
        before: Called with each step before its forward.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        before(step)
        optimizer.zero_grad()
        model(batch(rank, step)).pow(2).mean().backward()
        optimizer.step()
    return shards(model)


def shards(model: Any) -> list[torch.Tensor]:
    """Copies of this rank's shards and their gradients."""
    tensors = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return [tensor.to_local().detach().clone() for tensor in tensors]
