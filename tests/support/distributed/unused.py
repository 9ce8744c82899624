"""Models that leave parameters unused."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Branching(nn.Module):
    """The layer `sometimes` is skipped unless `takes` is set, `never` always. Each layer is a bucket of its own."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.sometimes, self.never, self.head = (nn.Linear(8, 8) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor, takes: bool) -> torch.Tensor:
        h = self.trunk(x)
        if self.reentrant:
            h = h + checkpoint(self.sometimes, h, use_reentrant=True) if takes else h
        elif takes:
            h = h + self.sometimes(h)
        return self.head(h)  # type: ignore[no-any-return]


class Reused(nn.Module):
    """A layer used three times: in two reentrant checkpoints, and outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.layer, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.first(x))
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return self.last(x)  # type: ignore[no-any-return]
