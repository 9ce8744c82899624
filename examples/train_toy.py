"""The toy model of torch's DDP tutorial, with torch's own DDP and no line about telemetry.

ddpobs run -- torchrun --nproc-per-node 2 examples/train_toy.py

The collector then has the run.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class ToyModel(nn.Module):
    """Two linear layers: 10 inputs, 5 outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))  # type: ignore[no-any-return]


def main() -> None:
    """Train, and print each rank's last loss."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=500)
    steps = options.parse_args().steps
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ddp_model = DistributedDataParallel(ToyModel())
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)
    torch.manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(20, 10))
        loss = loss_fn(outputs, torch.randn(20, 5))
        loss.backward()
        optimizer.step()
    print(f"rank {rank}: loss {loss.item():.3f} after {steps} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
