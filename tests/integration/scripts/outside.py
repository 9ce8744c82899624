"""Trains with most of its time outside of steps: `outside.py KIND`.

The kinds are checkpoints, validation, barrier, restart, steps and prepare. In `prepare`, rank 1 waits for rank 0 before
the first step.
`steps` spends no time outside of steps. `restart` starts slowly, saves a checkpoint after 10 steps, and fails after 20,
once.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ddpobs import DistributedDataParallel

STEPS, PAUSE_S, START_S = 40, 0.25, 1.5


class Slow:
    """An object that takes long to pickle, as a large model on a slow file system does."""

    def __getstate__(self) -> dict[str, int]:
        time.sleep(PAUSE_S)
        return {"value": 1}


def pause(kind: str, rank: int, ddp: DistributedDataParallel) -> None:
    if kind == "validation":
        ddp.eval()
        with torch.no_grad():
            ddp(torch.randn(4, 8))
            time.sleep(PAUSE_S)
            ddp(torch.randn(4, 8))
        ddp.train()  # type: ignore[no-untyped-call]
        return
    if rank == 0 and kind == "checkpoints":
        torch.save({"model": Slow()}, Path(os.environ["OUT"]) / "checkpoint.pt")
    elif rank == 0:
        time.sleep(PAUSE_S)
    dist.barrier()


def prepare(rank: int) -> None:
    if rank == 0:
        time.sleep(START_S)
    dist.barrier()


def restart(step: int, rank: int) -> None:
    failed = Path(os.environ["OUT"]) / "failed"
    if step == 9 and rank == 0:
        torch.save({"step": step}, Path(os.environ["OUT"]) / "checkpoint.pt")
    if step == 19 and rank == 1 and not failed.exists():
        failed.touch()
        raise RuntimeError("a fault after 20 steps")


def main() -> None:
    kind, rank = sys.argv[1], int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if kind == "restart":
        time.sleep(START_S)
    ddp = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    if kind == "prepare":
        prepare(rank)
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        if kind == "restart":
            restart(step, rank)
        elif kind not in ("steps", "prepare") and step % 2 == 0:
            pause(kind, rank, ddp)
    dist.destroy_process_group()


main()
