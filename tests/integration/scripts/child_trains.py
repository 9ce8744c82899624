"""Two ranks, of which rank 0 starts a program that trains by itself, in the way of the first argument.

The program is this script with the argument `child`, in the environment that it inherits.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

STEPS, CHILD_STEPS = 30, 5
CHILD = [sys.executable, __file__, "child"]


def train(steps: int) -> None:
    model = DistributedDataParallel(torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        time.sleep(0.05)


def child() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    train(CHILD_STEPS)
    dist.destroy_process_group()


def start_child(way: str) -> None:
    if way == "program":
        subprocess.run(CHILD, check=True)
    elif way == "orphan":  # Another process than the rank becomes its parent.
        subprocess.run(["sh", "-c", '"$@" & echo $!', "sh", *CHILD], check=True, stdout=subprocess.DEVNULL)
    elif way == "fork":
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 0


def rank(way: str) -> None:
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    train(STEPS)
    if way == "fork":  # Gloo's threads do not exist in a forked process.
        dist.destroy_process_group()
    if is_first:
        start_child(way)
    if way != "fork":
        train(STEPS)
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    child() if sys.argv[1] == "child" else rank(sys.argv[1])
