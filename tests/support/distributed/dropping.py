"""Models whose steps leave layers out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ddpobs import LayerDrop


class Stack(nn.Module):
    """Residual layers, each a bucket of its own with a small cap, between two layers that stay."""

    def __init__(self, probability: float = 0.5, count: int = 5, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = LayerDrop((nn.Linear(8, 8) for _ in range(count)), probability, seed)

    def forward(self, x: torch.Tensor, also: int | None = None) -> torch.Tensor:
        """Run the layers that are kept, and the layer `also`."""
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x).tanh()
        if also is not None:
            x = x + self.layers[also](x)
        return self.last(x)  # type: ignore[no-any-return]


def draw(ddp: Any, step: int) -> None:
    """Drop the layers of this step under torch's DDP too; ours draws the same ones itself."""
    for module in ddp.modules():
        if isinstance(module, LayerDrop):
            module.draw(step)
