"""A contrastive loss with cached gradients: it trains the DDP module inside a hook of its own backward."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

ROWS, WIDTH = 16, 8


class Encoder(nn.Module):
    """Sleeps in each forward with gradients."""

    def __init__(self, slow_s: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH))
        self.slow_s = slow_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.slow_s and torch.is_grad_enabled():
            time.sleep(self.slow_s)
        return self.layers(x)  # type: ignore[no-any-return]


def cached_loss(encoders: Any, columns: Any, rows: int, last_alone: bool = False) -> torch.Tensor:
    """Return a loss; a hook of its backward runs a forward and a backward of each mini-batch.

    Args:
        encoders: The encoder of each of two columns.
        columns: Two batches of `ROWS` rows.
        rows: Rows of a mini-batch.
        last_alone: Only the last mini-batch of a column synchronises.
    """
    with torch.no_grad():
        outputs = [[encoder(x) for x in column.split(rows)] for encoder, column in zip(encoders, columns, strict=True)]
    leaves = [[output.detach().requires_grad_() for output in column] for column in outputs]
    first, second = (F.normalize(torch.cat(column)) for column in leaves)
    loss = F.cross_entropy(first @ second.T, torch.arange(len(first)))
    loss.backward()
    carrier = loss.detach().requires_grad_()

    def train(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            for encoder, column, cached in zip(encoders, columns, leaves, strict=True):
                parts = column.split(rows)
                for number, (x, leaf) in enumerate(zip(parts, cached, strict=True), 1):
                    with encoder.no_sync() if last_alone and number < len(parts) else nullcontext():
                        ((encoder(x) * leaf.grad).sum() * gradient).backward()

    carrier.register_hook(train)
    return carrier


def batches(steps: int, with_loader: bool) -> Any:
    """Return pairs of columns, from a DataLoader or without."""
    generator = torch.Generator().manual_seed(1)
    columns = [torch.randn(steps * ROWS, WIDTH, generator=generator) for _ in range(2)]
    if with_loader:
        return DataLoader(TensorDataset(*columns), batch_size=ROWS)
    return zip(*(column.split(ROWS) for column in columns), strict=True)
