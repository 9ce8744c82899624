"""The private state of torch's loader iterators, read from real iterators."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from ddpobs.torch_seam.loaders import awaited_worker, is_alone, time_collate


class Samples(Dataset[torch.Tensor]):
    """Sixteen samples; the second worker needs a second for each."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        worker = get_worker_info()
        if worker is not None and worker.id == 1:
            time.sleep(1.0)
        return torch.tensor(index)


def test_the_slow_worker_is_awaited_and_is_alone() -> None:
    batches: Any = iter(DataLoader(Samples(), num_workers=3))
    assert awaited_worker(batches) == 0
    next(batches)
    assert awaited_worker(batches) == 1
    next(batches)
    assert is_alone(batches, 1)
    assert not is_alone(batches, 0)


def test_without_workers_or_with_one_no_worker_is_alone() -> None:
    assert awaited_worker(iter(DataLoader(Samples()))) is None
    batches: Any = iter(DataLoader(Samples(), num_workers=1))
    assert awaited_worker(batches) == 0
    next(batches)
    assert not is_alone(batches, 0)
    assert not is_alone(object(), 0)


def test_calls_of_collate_are_timed_once_each_and_the_loader_keeps_its_own() -> None:
    def collate(samples: list[torch.Tensor]) -> Any:
        time.sleep(0.01)
        return default_collate(samples)

    loader, times_ns = DataLoader(Samples(), batch_size=8, collate_fn=collate), list[int]()
    batches = iter(loader)
    time_collate(batches, times_ns.append)
    time_collate(batches, times_ns.append)
    assert len(list(batches)) == len(times_ns) == 2
    assert min(times_ns) >= 10_000_000
    assert loader.collate_fn is collate
