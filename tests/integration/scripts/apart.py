"""Ranks that train apart, or would: `apart.py CASE`.

The door is `$DOOR`: `ours`, `attach`, or empty for torch's own DDP.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from doors import wait_for_name
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ddpobs

DOOR = os.environ.get("DOOR")
if DOOR == "ours":
    from ddpobs import DistributedDataParallel
else:
    from torch.nn.parallel import DistributedDataParallel  # type: ignore[assignment]

BATCHES = 40


class Tuned(nn.Module):
    """A backbone and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.backbone(x)))  # type: ignore[no-any-return]

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).pow(2).mean()  # type: ignore[no-any-return]


def average(tensors: Iterable[Any]) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor.div_(dist.get_world_size())


def main(case: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, rank = Tuned(), dist.get_rank()
    if case == "unfreeze":
        model.backbone.requires_grad_(False)
    ddp: Any = DistributedDataParallel(model)
    if DOOR == "attach":
        ddpobs.attach(ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = TensorDataset(torch.randn(4 * BATCHES, 16, generator=torch.Generator().manual_seed(rank)))
    for index, (x,) in enumerate(DataLoader(data, batch_size=4)):
        if case == "unfreeze" and index == 5:
            model.backbone.requires_grad_(True)
        if case in {"by-hand", "averaged"}:
            with ddp.no_sync():
                ddp(x).pow(2).mean().backward()
        elif case == "bypass":
            ddp.module.training_step(x).backward()
        elif case == "off-by-one":
            with ddp.no_sync() if index % 4 else nullcontext():
                ddp(x).pow(2).mean().backward()
        else:
            ddp(x).pow(2).mean().backward()
        if case == "by-hand":
            average(parameter.grad for parameter in model.parameters())
        if case != "off-by-one" or index % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        if case == "averaged" and index % 5 == 4:
            average(parameter.data for parameter in model.parameters())
    total = float(torch.cat([p.detach().flatten().double() for p in model.parameters()]).sum())
    sys.stdout.write(f"SUM {total}\n")
    wait_for_name()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
