"""Trains a model that FSDP2 shards: `sharded.py [FAULT] [STEPS]`. The faults are real work, or a real wait, on rank 1.

`slow-forward` and `slow-backward` work longer in block 1. In step 5, `hang` stops before the forward, and `crash`
raises an error in the backward of block 1. On all ranks `ignored` leaves the head out of every unit, `busy` works
longer in each block, and `wide` has blocks of 8 MB for a single row of input.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

FAULT, STEPS = [*sys.argv[1:], "", ""][0], int([*sys.argv[2:], "60"][0])
WIDTH, ROWS = (1024, 1) if FAULT == "wide" else (96, 64)
BLOCKS, FAULTY_STEP = 3, 5


class Extra(torch.autograd.Function):
    """Passes values and gradients through, with additional work in one direction."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, step: int, fault: str) -> torch.Tensor:
        ctx.step, ctx.fault = step, fault
        if fault == "slow-forward":
            work()
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.fault == "slow-backward":
            work()
        if ctx.fault == "crash" and ctx.step == FAULTY_STEP:
            raise RuntimeError("no backward for block 1")
        return gradients[0], None, None


def work() -> None:
    """Multiply matrices for about 20 ms."""
    matrix = torch.randn(160, 160)
    for _ in range(150):
        matrix = torch.tanh(matrix @ matrix)


class Block(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.step = fault, 0
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return self.inner(Extra.apply(values, self.step - 1, self.fault))  # type: ignore[no-untyped-call, no-any-return]


class Model(nn.Module):
    def __init__(self, faults: dict[int, str]) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList(Block(faults.get(index, "")) for index in range(BLOCKS))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        values = self.stem(inputs)
        for block in self.blocks:
            values = block(values)
        return self.head(values)  # type: ignore[no-any-return]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    faults = {1: FAULT} if rank == 1 else {}
    model = Model(dict.fromkeys(range(BLOCKS), "slow-forward") if FAULT == "busy" else faults)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, ignored_params={*model.head.parameters()} if FAULT == "ignored" else set())
    if "ATTACH" in os.environ:
        import ddpobs

        ddpobs.attach(model, telemetry=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        if FAULT == "hang" and rank == 1 and step == FAULTY_STEP:
            time.sleep(3600)
        optimizer.zero_grad()
        batch = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        model(batch).pow(2).mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
