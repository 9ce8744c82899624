"""Small models with hard cases for a reducer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Cnn(nn.Module):
    """Convolutions with BatchNorm buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten()
        )
        self.head = nn.Linear(8 * 4 * 4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]

    @staticmethod
    def batch(rank: int, step: int) -> torch.Tensor:
        return torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(100 * rank + step))


class Transformer(nn.Module):
    """Two encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)  # type: ignore[no-any-return]

    @staticmethod
    def batch(rank: int, step: int) -> torch.Tensor:
        return torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(100 * rank + step))


class Branches(nn.Module):
    """A branch that a negative first element skips, and a branch that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.sometimes, self.never, self.head = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.trunk(x)
        if bool(x[0, 0] > 0):
            h = h + self.sometimes(h)
        return self.head(h)  # type: ignore[no-any-return]

    @staticmethod
    def batch(rank: int, step: int) -> torch.Tensor:
        batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * rank + step))
        batch[0, 0] = 1.0 if (rank + step) % 3 else -1.0
        return batch


MODELS: dict[str, Any] = {"cnn": Cnn, "transformer": Transformer, "branches": Branches}


def build(name: str) -> nn.Module:
    """Build the same model on every rank."""
    torch.manual_seed(7)
    return MODELS[name]()  # type: ignore[no-any-return]
