"""A training with faults of a known size: `python training.py FAULTS`, one process per rank.

`FAULTS` is a JSON list; each entry has the fields of `Fault`. The ranks first measure a step without telemetry; each
delay is a share of it. A delay is real work: products of matrices, for this much time of the thread's processor. Each
rank writes the times of its faults by step to `$OUT/injected-RANK.json`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DataLoader, Dataset

from ddpobs import DistributedDataParallel

STEPS, CALIBRATION_STEPS = int(os.environ.get("STEPS", "120")), 15
LAYERS, WIDTH, ROWS, CAP_MB = 8, 128, 2048, 0.0625
"""One layer fills one bucket. Its bytes are few: on two processors reducing them competes with training."""


@dataclass(frozen=True)
class Fault:
    """Extra work of one rank.

    Attributes:
        rank: The rank.
        phase: `data`, `forward`, `backward` or `optimizer`.
        share: Delay, as a share of the step.
        layer: Layer before whose gradient backward is slow.
        first: First step with the fault.
        last: Last step with it.
        every: The fault is in steps whose number leaves `turn` when divided by this.
        turn: The remainder.
    """

    rank: int
    phase: str
    share: float
    layer: int = LAYERS - 1
    first: int = 0
    last: int = 10**9
    every: int = 1
    turn: int = 0

    def holds(self, step: int) -> bool:
        """Whether the fault is in this step."""
        return self.first <= step <= self.last and step % self.every == self.turn


class Work:
    """The work of one rank's faults, with its wall time and its time on a processor by step."""

    def __init__(self, faults: list[Fault]) -> None:
        self._faults, self._matrix = faults, torch.randn(64, 64)
        self.step, self.typical_ns = -1, 0.0
        self.injected_ns: dict[int, int] = {}
        self.work_ns: dict[int, int] = {}

    def run(self, phase: str, layer: int = LAYERS - 1) -> None:
        """Run the work of a phase, if this step has any."""
        for fault in self._faults:
            if fault.phase == phase and fault.layer == layer and fault.holds(self.step):
                began_ns, began_work_ns = time.perf_counter_ns(), time.thread_time_ns()
                while time.thread_time_ns() - began_work_ns < fault.share * self.typical_ns:
                    self._matrix @ self._matrix
                self.injected_ns[self.step] = time.perf_counter_ns() - began_ns
                self.work_ns[self.step] = time.thread_time_ns() - began_work_ns


class SlowBackward(torch.autograd.Function):
    """The identity; its backward runs the work."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, work: Work, layer: int) -> torch.Tensor:
        """Return the input."""
        ctx.work, ctx.layer = work, layer
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Run the work, and return the gradient."""
        ctx.work.run("backward", ctx.layer)
        return gradients[0], None, None


class Chain(nn.Module):
    """Layers of one width."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.work = work

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the last layer's output."""
        self.work.run("forward")
        for number, layer in enumerate(self.layers):
            rows = SlowBackward.apply(torch.relu(layer(rows)), self.work, number)  # type: ignore[no-untyped-call]
        return rows


class Batches(Dataset[torch.Tensor]):
    """A batch for each step, which the training thread makes."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> torch.Tensor:
        self.work.step = step
        self.work.run("data")
        return torch.randn(ROWS, WIDTH)


def typical_step_ns(model: nn.Module) -> float:
    """Return the median wall time of a step with torch's own DDP, which has no telemetry, and without a fault."""
    ddp = TorchDDP(model, bucket_cap_mb=CAP_MB)
    times_ns = []
    for _ in range(CALIBRATION_STEPS):
        began_ns = time.perf_counter_ns()
        ddp(torch.randn(ROWS, WIDTH)).square().mean().backward()
        times_ns.append(time.perf_counter_ns() - began_ns)
    model.zero_grad()
    return statistics.median(times_ns)


def main() -> None:
    """Train."""
    rank = int(os.environ["RANK"])
    faults = [Fault(**entry) for entry in json.loads(sys.argv[1])]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    # Only the training thread is pinned. Gloo's threads would compete with it on one processor, on the late rank alone.
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [processors[rank % len(processors)]])
    work = Work([fault for fault in faults if fault.rank == rank])
    work.typical_ns = typical_step_ns(Chain(work))
    model = Chain(work)
    ddp = DistributedDataParallel(model, bucket_cap_mb=CAP_MB)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    optimizer.register_step_pre_hook(lambda *_: work.run("optimizer"))
    for batch in DataLoader(Batches(work), batch_size=None):
        ddp(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()
    (Path(os.environ["OUT"]) / f"injected-{rank}.json").write_text(
        json.dumps({"typical_ns": work.typical_ns, "injected_ns": work.injected_ns, "work_ns": work.work_ns})
    )


if __name__ == "__main__":
    main()
