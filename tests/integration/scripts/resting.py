"""Trains a small model while telemetry rests from time to time: `resting.py costly|plain`.

With `costly`, recording a backward takes 20 ms more.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from ddpobs import DistributedDataParallel
from ddpobs.recording.module_recorder import ModuleRecorder

STEPS = 64 * 9


def make_costly() -> None:
    finished = ModuleRecorder.finished

    def costly(recorder: ModuleRecorder, record: Any) -> None:
        time.sleep(0.02)
        finished(recorder, record)

    ModuleRecorder.finished = costly  # type: ignore[method-assign,assignment]


def main(kind: str) -> None:
    if kind == "costly":
        make_costly()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    rows = torch.utils.data.TensorDataset(torch.randn(4 * STEPS, 64))
    for (batch,) in torch.utils.data.DataLoader(rows, batch_size=4):
        optimizer.zero_grad()
        ddp(batch).pow(2).mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
