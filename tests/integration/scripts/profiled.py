"""Trains beside ddpobs and torch.profiler: `profiled.py FOLDER STEPS [fsdp2]`. Rank 1 sleeps in each step."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

import ddpobs

FOLDER, STEPS = sys.argv[1], int(sys.argv[2])
SKIPPED, SLEPT_S, WIDTH = 2, 0.02, 512


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model: torch.nn.Module = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    if "fsdp2" in sys.argv:
        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model, bucket_cap_mb=1)
    ddpobs.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = torch.utils.data.TensorDataset(torch.randn(32 * (STEPS + 2 * SKIPPED), WIDTH))
    recorded = schedule(wait=SKIPPED, warmup=1, active=STEPS, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=recorded) as profiler:
        for (batch,) in torch.utils.data.DataLoader(rows, batch_size=32):
            if rank == 1:
                time.sleep(SLEPT_S)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            profiler.step()
    profiler.export_chrome_trace(f"{FOLDER}/rank{rank}.json")
    dist.destroy_process_group()


main()
