"""Trainings of two ranks whose time goes into their input, or into their own code.

python input_cases.py CASE
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from ddpobs import DistributedDataParallel

STEPS = 45
ROWS = 4
WAIT_S = 0.05
"""Time of a slow part of a step."""
PAUSE_S = 0.008


class Samples(Dataset[torch.Tensor]):
    """Samples that take time to prepare, perhaps in one worker alone."""

    def __init__(self, sample_s: float = 0.0, only_worker: int | None = None) -> None:
        self.sample_s, self.only_worker = sample_s, only_worker

    def __len__(self) -> int:
        return 10 * STEPS * ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        worker = get_worker_info()
        if self.only_worker is None or (worker is not None and worker.id == self.only_worker):
            time.sleep(self.sample_s)
        return torch.full((16,), float(index % 7))


class OwnLoader:
    """An iterator class that does not use torch's."""

    def __iter__(self) -> OwnLoader:
        return self

    def __next__(self) -> torch.Tensor:
        return slow_batch()


def slow_batch(_: object = None) -> torch.Tensor:
    time.sleep(WAIT_S)
    return torch.ones(ROWS, 16)


def generator() -> Iterator[torch.Tensor]:
    while True:
        yield slow_batch()


def slow_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    time.sleep(WAIT_S)
    batch: torch.Tensor = default_collate(samples)
    return batch


def loader(dataset: Samples, workers: int = 0, **arguments: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(dataset, batch_size=ROWS, num_workers=workers, **arguments)


CASES: dict[str, Any] = {
    "generator": generator,
    "class": OwnLoader,
    "few-workers": lambda: loader(Samples(WAIT_S / ROWS), workers=1, prefetch_factor=1),
    "slow-worker": lambda: loader(Samples(6 * WAIT_S / ROWS, only_worker=1), workers=3),
    "slow-collate": lambda: loader(Samples(), collate_fn=slow_collate),
    "quick": lambda: loader(Samples()),
    "logging": lambda: loader(Samples()),
    "one-processor": lambda: loader(Samples()),
}


def log_loss() -> None:
    time.sleep(WAIT_S / 2)


def compute() -> None:
    """Compute on the lowest processor, as both ranks do."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    end = time.thread_time() + WAIT_S / 2
    while time.thread_time() < end:
        pass


AFTER_STEP = {"logging": log_loss, "one-processor": compute}


class Pause(nn.Module):
    """Time of the model's own work."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSE_S)
        return batch


def train(case: str) -> None:
    """Train one case, with telemetry."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Sequential(Pause(), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    def step(batch: torch.Tensor) -> None:
        ddp(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if case in AFTER_STEP:
            AFTER_STEP[case]()

    if case == "iter-each-step":
        batches = loader(Samples(), workers=1)
        for _ in range(STEPS):
            step(next(iter(batches)))
    else:
        for number, batch in enumerate(CASES[case]()):
            step(batch)
            if number == (STEPS * 2 // 3 if case == "slow-worker" else STEPS):
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    train(sys.argv[1])
