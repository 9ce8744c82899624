"""Trainings of two ranks whose time goes into their input, or into their own code: `train` runs one case on a rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from ddpobs import DistributedDataParallel, TelemetryConfig

STEPS = 50
ROWS = 4
WAIT_S = 0.05
"""Time of a slow part of a step; the rest takes a few milliseconds."""


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
    return default_collate(samples)


def fresh(loader: DataLoader[torch.Tensor]) -> Iterator[torch.Tensor]:
    while True:
        yield next(iter(loader))


def loader(dataset: Samples, workers: int = 0, **arguments: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(dataset, batch_size=ROWS, num_workers=workers, **arguments)


CASES: dict[str, Any] = {
    "generator": generator,
    "enumerated": lambda: (batch for _, batch in enumerate(generator())),
    "class": OwnLoader,
    "in-c": lambda: map(slow_batch, iter(int, 1)),
    "no-workers": lambda: loader(Samples(WAIT_S / ROWS)),
    "few-workers": lambda: loader(Samples(2 * WAIT_S / ROWS), workers=2),
    "slow-worker": lambda: loader(Samples(3 * WAIT_S / ROWS, only_worker=1), workers=3),
    "slow-collate": lambda: loader(Samples(), collate_fn=slow_collate),
    "quick": lambda: loader(Samples()),
    "logging": lambda: loader(Samples()),
    "metrics": lambda: loader(Samples()),
}


def log_loss(loss: float) -> float:
    time.sleep(WAIT_S / 2)
    return loss


def count_metrics() -> int:
    """Metrics in pure Python, on the processor."""
    ends, hits = time.perf_counter() + WAIT_S / 2, 0
    while time.perf_counter() < ends:
        hits += sum(index % 3 == 0 for index in range(1000))
    return hits


def train(rank: int, world_size: int, url: str, run: str, case: str, traceback: bool = True) -> None:
    """Train one case, with telemetry."""
    torch.set_num_threads(1)
    config = TelemetryConfig(collector=url, run=run, flush_s=0.5, pulse_s=0.5, exit_s=30, traceback=traceback)
    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    ddp = DistributedDataParallel(model, telemetry=config)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    def step(batch: torch.Tensor) -> None:
        time.sleep(0.003)
        ddp(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if case == "logging":
            log_loss(1.0)
        elif case == "metrics":
            count_metrics()

    if case == "iter-each-step":
        batches = loader(Samples(), workers=1)
        for _ in range(STEPS):
            step(next(iter(batches)))
    else:
        for number, batch in enumerate(CASES[case]()):
            step(batch)
            if number == STEPS:
                break
