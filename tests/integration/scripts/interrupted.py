"""A training on every rank that handles SIGINT in the way of its argument, and writes `$OUT/ready` once it trains."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ddpobs import DistributedDataParallel

stopped = False


def train(steps: int) -> None:
    for step in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        time.sleep(0.02)
        if step == 20 and dist.get_rank() == 0:
            Path(os.environ["OUT"], "ready").touch()
        if stopped:
            break


def stop(*_: object) -> None:
    global stopped  # noqa: PLW0603
    stopped = True


torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
how = sys.argv[1]
if how == "own handler":
    signal.signal(signal.SIGINT, stop)
try:
    train(100_000)
except KeyboardInterrupt:
    if how == "raised":
        raise
    if how == "failed later":
        train(40)
        raise ValueError("a bad sample") from None
    if how == "went on":
        train(40)
if how == "exit status":
    sys.exit(1)
