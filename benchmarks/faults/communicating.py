"""A training whose communication has a known fault: `python communicating.py CASE`, one process per rank.

`$STEPS` is the number of steps. Rank 0 writes the file `$OUT/ready` after `$READY_STEP` steps: the caller may then
change the speed of the links. `ATTACHED=1` uses torch's own DDP with an attachment.

| case | buckets | compute |
|---|---|---|
| `bytes` | 2 MB in eight buckets | little |
| `many` | 64 buckets of 4 kB | little |
| `single` | 0.3 MB in one bucket | little |
| `small` | two buckets of less than 2 kB | little |
| `balanced` | 2 MB in eight buckets | more than a link of 1 Gbit/s needs |
| `order` | as `balanced`; the layers are registered in the reverse order of their use | as `balanced` |
| `swings` | as `small` | 20 ms a step, and 32 ms in every second stretch of ten steps |
| `steady` | as `small` | 26 ms a step |
"""

from __future__ import annotations

import os
import sys
import time
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddpobs import DistributedDataParallel, attach

STEPS = int(os.environ.get("STEPS", "60"))
READY_STEP = int(os.environ.get("READY_STEP", "0"))
STRETCH_STEPS = 10


class Chain(nn.Module):
    """Layers of one width, used from the last registered to the first if `reverses`."""

    def __init__(self, width: int, layers: int, reverses: bool) -> None:
        super().__init__()
        names = [f"layer{number:02}" for number in range(layers)]
        self.layers = nn.ModuleDict(OrderedDict((name, nn.Linear(width, width)) for name in names))
        self.names = names[::-1] if reverses else names

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the last used layer's output."""
        for name in self.names:
            rows = torch.relu(self.layers[name](rows))
        return rows


def model(case: str) -> tuple[nn.Module, torch.Tensor]:
    """Return the wrapped model and a batch."""
    torch.manual_seed(0)
    shapes = {"bytes": (256, 8, 0.25), "many": (32, 64, 0.001), "single": (256, 1, 25.0)}
    shapes |= dict.fromkeys(("balanced", "order"), (256, 8, 0.25))
    width, layers, cap_mb = shapes.get(case, (16, 2, 0.001))
    chain = Chain(width, layers, reverses=case == "order")
    batch = torch.randn({"balanced": 2048, "order": 1024}.get(case, 8), width)
    unused = case == "order"  # Buckets are not rebuilt in the order of the gradients then.
    if os.environ.get("ATTACHED") == "1":
        wrapped = TorchDDP(chain, bucket_cap_mb=cap_mb, find_unused_parameters=unused)
        attach(wrapped, telemetry=None)
        return wrapped, batch
    return DistributedDataParallel(chain, bucket_cap_mb=cap_mb, find_unused_parameters=unused), batch


def pause_s(case: str, step: int) -> float:
    """Return the time that the step's input takes, on all ranks."""
    if case == "swings":
        return 0.032 if step // STRETCH_STEPS % 2 else 0.020
    return 0.026 if case == "steady" else 0.0


def main() -> None:
    """Train."""
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    wrapped, batch = model(case)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
    for step in range(STEPS):
        time.sleep(pause_s(case, step))
        optimizer.zero_grad()
        wrapped(batch).pow(2).mean().backward()
        optimizer.step()
        if step + 1 == READY_STEP and dist.get_rank() == 0:
            (Path(os.environ["OUT"]) / "ready").touch()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
