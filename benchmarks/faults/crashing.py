"""A training in which rank 1 ends: `python crashing.py KIND PHASE`, one process per rank.

Rank 1 ends in step `FAULT_STEP`, in the given phase. Before, it writes the file `$OUT/ready`. `$OUT/steps-RANK` has the
time of each step's end, eight bytes each (`step_ends`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULTY = 1
FAULT_STEP = int(os.environ.get("FAULT_STEP", "250"))
GROUP_TIMEOUT_S = float(os.environ.get("GROUP_TIMEOUT_S", "120"))
KINDS = ("exception", "kill", "exit", "segfault", "terminate")
PHASES = ("data", "forward", "backward", "optimizer")


def step_ends(folder: Path, rank: int) -> list[float]:
    """Times (`time.time`) at which the rank's steps ended."""
    data = (folder / f"steps-{rank}").read_bytes()
    return [moment for (moment,) in struct.iter_unpack("d", data[: len(data) // 8 * 8])]


class Fault:
    """The end of this process, armed in one step."""

    def __init__(self, kind: str, phase: str) -> None:
        self.kind, self.phase, self.armed = kind, phase, False

    def at(self, phase: str) -> None:
        """End the process if this is the phase."""
        if not self.armed or phase != self.phase:
            return
        (Path(os.environ["OUT"]) / "ready").touch()
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "exit":
            os._exit(3)
        elif self.kind == "segfault":
            ctypes.string_at(0)
        elif self.kind == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.kind == "hang":
            time.sleep(3600)
        else:
            raise ValueError("a bad sample")
        time.sleep(60)


class Batches(Dataset[torch.Tensor]):
    """Random rows, one batch every 10 ms."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        self._fault.armed = index == FAULT_STEP and int(os.environ["RANK"]) == FAULTY
        self._fault.at("data")
        time.sleep(0.01)
        return torch.randn(8, 64)


class Layer(nn.Linear):
    """A layer that may end the process in forward."""

    fault: Fault

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        self.fault.at("forward")
        return super().forward(rows)


class Descent(torch.optim.SGD):
    """An optimizer that may end the process."""

    fault: Fault

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters."""
        self.fault.at("optimizer")
        super().step(closure)


def main() -> None:
    """Train."""
    from ddpobs import DistributedDataParallel

    fault = Fault(sys.argv[1], sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    Layer.fault = Descent.fault = fault
    first = Layer(64, 64)
    layers = nn.Sequential(first, nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    first.weight.register_hook(lambda _: fault.at("backward"))
    if os.environ.get("MODE") == "run":
        model: nn.Module = nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.02)
    else:
        model = DistributedDataParallel(layers, bucket_cap_mb=0.02)
    optimizer = Descent(model.parameters(), lr=0.01)
    with (Path(os.environ["OUT"]) / f"steps-{dist.get_rank()}").open("wb", buffering=0) as steps:
        for rows in DataLoader(Batches(fault), batch_size=None):
            optimizer.zero_grad()
            model(rows).sum().backward()
            optimizer.step()
            steps.write(struct.pack("d", time.time()))


if __name__ == "__main__":
    main()
