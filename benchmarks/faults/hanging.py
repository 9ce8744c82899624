"""A training that hangs, or only looks as if it did: `python hanging.py CASE`, one process per rank.

The fault begins after `FAULT_STEP` steps, on rank 1 unless the case says otherwise. `cut-link`, `cut-host`, `stop` and
`kill` need the caller, which cuts the link or signals the process once rank 1 has written the file `$OUT/ready`.
`ATTACHED=1` uses torch's own DDP with an attachment.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DataLoader, Dataset

from ddpobs import DistributedDataParallel, attach

FAULT_STEP = 40
STEPS = 10_000
FAULTY = 1


class Batches(Dataset[torch.Tensor]):
    """Random rows; from the fault on, `blocks` makes each of them wait for ever."""

    def __init__(self, blocks: bool, steps: int = STEPS) -> None:
        self._blocks, self._steps = blocks, steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._blocks and index >= FAULT_STEP:
            mark_fault()
            time.sleep(3600)
        time.sleep(0.01)
        return torch.randn(8, 64)


def mark_fault() -> None:
    """Show the caller that the fault begins."""
    (Path(os.environ["OUT"]) / "ready").write_text(str(os.getpid()))


def model(case: str) -> nn.Module:
    """Three layers in two buckets or more, in some cases with buffers, which each forward broadcasts.

    Gloo ends the process of an extra all-reduce that meets a larger bucket; one that meets a broadcast waits.
    """
    norm = nn.BatchNorm1d(64) if case in {"evaluate-alone", "extra-all-reduce"} else nn.Identity()
    layers = nn.Sequential(nn.Linear(64, 64), norm, nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    if os.environ.get("ATTACHED") == "1":
        attached = TorchDDP(layers, bucket_cap_mb=0.02)
        attach(attached, telemetry=None)
        return attached
    return DistributedDataParallel(layers, bucket_cap_mb=0.02)


def wait_for_a_lock() -> None:
    """Wait for a lock that another thread holds and never gives back."""
    lock, taken = threading.Lock(), threading.Event()

    def keep() -> None:
        with lock:
            taken.set()
            time.sleep(3600)

    threading.Thread(target=keep, daemon=True).start()
    taken.wait()
    with lock:
        pass


def wait_in_two_threads(rank: int) -> None:
    """Call two collectives of one group from two threads, in another order on rank 0 than on the other ranks."""
    writer = threading.Thread(target=dist.all_reduce, args=(torch.zeros(1000),), name="writer", daemon=True)
    if rank == 0:
        writer.start()
        time.sleep(0.5)
    else:
        threading.Timer(0.5, writer.start).start()
    dist.barrier()


def evaluate(ddp: nn.Module) -> None:
    """Evaluate through the wrapper with gradients enabled: each forward broadcasts the buffers.

    Without gradients only the first forward would, and the next training forward would not: torch makes up for it.
    """
    ddp.eval()
    for _ in range(3):
        ddp(torch.randn(8, 64))
    ddp.train()


def at_fault(case: str, rank: int, ddp: nn.Module) -> bool:
    """Do what the case does at the fault; returns whether this step is left out."""
    if case == "skip-batch" and rank == FAULTY:
        return True
    if case == "evaluate-alone" and rank == FAULTY:
        evaluate(ddp)
    elif case == "extra-all-reduce" and rank == FAULTY:
        dist.all_reduce(torch.zeros(1))
    elif case == "two-threads":
        wait_in_two_threads(rank)
    elif case == "lock" and rank == FAULTY:
        wait_for_a_lock()
    elif case == "slow" and rank == FAULTY:
        time.sleep(6)
    elif case == "checkpoint" and rank == 0:
        Slow.seconds = float(os.environ.get("PAUSE_S", "20"))
        torch.save({"model": Slow()}, Path(os.environ["OUT"]) / "checkpoint.pt")
    elif case == "evaluation":
        with torch.no_grad():
            until = time.monotonic() + float(os.environ.get("PAUSE_S", "20"))
            ddp.eval()
            while time.monotonic() < until:
                ddp.module(torch.randn(8, 64))  # type: ignore[operator]
                time.sleep(0.2)
            ddp.train()
    return False


class Slow:
    """An object that takes long to pickle, as a large model on a slow file system does."""

    seconds = 0.0

    def __getstate__(self) -> dict[str, int]:
        time.sleep(self.seconds)
        return {"value": 1}


def batches(case: str, rank: int) -> Iterator[torch.Tensor]:
    """The rank's batches."""
    faulty = rank == FAULTY
    steps = FAULT_STEP if case == "fewer-batches" and faulty else int(os.environ.get("STEPS", STEPS))
    blocks = case == "all-in-data" or (case == "loader" and faulty)
    workers = 1 if os.environ.get("WORKERS") == "1" else 0
    yield from DataLoader(Batches(blocks, steps), batch_size=None, num_workers=workers)


def main() -> None:
    """Train."""
    case, rank = sys.argv[1], int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(hours=1))
    torch.manual_seed(0)
    ddp = model(case)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step, rows in enumerate(batches(case, rank)):
        if step == 0 and case == "first-step":
            time.sleep(float(os.environ.get("PAUSE_S", "60")))
        if step == FAULT_STEP:
            if rank == FAULTY:
                mark_fault()
            if at_fault(case, rank, ddp):
                continue
            if case == "checkpoint":
                dist.barrier()
        optimizer.zero_grad()
        ddp(rows).pow(2).mean().backward()
        optimizer.step()
    if case in {"fewer-batches", "skip-batch"}:
        mark_fault()
        time.sleep(3600)  # Its epoch is over: an upload, a report.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
