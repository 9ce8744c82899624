"""Random pictures of 8 x 8 with digits as labels, and a small network for them."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

torch.set_num_threads(1)


def pictures(first: int, count: int) -> TensorDataset:
    """Return the same pictures for the same place on every rank."""
    generator = torch.Generator().manual_seed(first)
    images = torch.rand(count, 1, 8, 8, generator=generator)
    return TensorDataset(images, torch.randint(10, (count,), generator=generator))


class Slow(Dataset[tuple[torch.Tensor, ...]]):
    """Pictures that load slowly, so that an evaluation counted as training shows in the times."""

    def __init__(self, first: int, count: int, seconds: float) -> None:
        self._pictures, self._pause_s = pictures(first, count), seconds / count

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        time.sleep(self._pause_s)
        picture: tuple[torch.Tensor, ...] = self._pictures[index]
        return picture


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
