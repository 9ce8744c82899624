"""Handwritten digits (scikit-learn's, 1,797 pictures of 8 x 8) and a small network that reads them."""

from __future__ import annotations

import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, TensorDataset

torch.set_num_threads(1)


def pictures(first: int, count: int) -> TensorDataset:
    digits = load_digits()
    images = torch.tensor(digits.images[first : first + count], dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(images, torch.tensor(digits.target[first : first + count]))


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
