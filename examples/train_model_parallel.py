"""The model-parallel example of torch's DDP tutorial: a model whose layers lie on two devices, inside of DDP.

    ddpobs run -- torchrun --nproc-per-node 2 examples/train_model_parallel.py

With two GPUs a rank, the halves lie on GPUs; otherwise both are on the CPU.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

WIDTH, ROWS = 512, 64


class ToyMpModel(nn.Module):
    """Two halves, each on its device."""

    def __init__(self, dev0: torch.device, dev1: torch.device) -> None:
        super().__init__()
        self.dev0, self.dev1 = dev0, dev1
        self.net1 = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).to(dev0)
        self.net2 = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 5)).to(dev1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net1(x.to(self.dev0))
        return self.net2(x.to(self.dev1))  # type: ignore[no-any-return]


def halves() -> tuple[torch.device, torch.device]:
    """Return the devices of this rank's halves."""
    first = 2 * int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.device_count() >= 2 * int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return torch.device("cuda", first), torch.device("cuda", first + 1)
    return torch.device("cpu"), torch.device("cpu")


def main() -> None:
    """Train, and print each rank's last loss."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=200)
    steps = options.parse_args().steps
    torch.set_num_threads(1)
    dev0, dev1 = halves()
    dist.init_process_group("nccl" if dev0.type == "cuda" else "gloo")
    rank = dist.get_rank()
    ddp_mp_model = DistributedDataParallel(ToyMpModel(dev0, dev1))  # No device_ids: the module chooses its devices.
    optimizer = torch.optim.SGD(ddp_mp_model.parameters(), lr=0.05)
    torch.manual_seed(rank)
    for _ in range(steps):
        inputs = torch.randn(ROWS, WIDTH)
        optimizer.zero_grad()
        outputs = ddp_mp_model(inputs)  # Outputs are on dev1.
        loss = mse_loss(outputs, inputs[:, :5].sin().to(dev1))
        loss.backward()
        optimizer.step()
    print(f"rank {rank}: loss {loss.item():.3f} after {steps} steps, layers on {dev0} and {dev1}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
