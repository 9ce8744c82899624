"""Trainings on one GPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

STEPS = 12


@contextmanager
def nccl_alone() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        dist.init_process_group("nccl", init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def net(width: int = 2048) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(6))).cuda()


def rows(width: int = 2048) -> torch.Tensor:
    return torch.randn(512, width, device="cuda")


def train(ddp: nn.Module, steps: int = STEPS, width: int = 2048, batch: torch.Tensor | None = None) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    batch = rows(width) if batch is None else batch
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(batch).pow(2).mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
