"""The example of torch's DDP notes, on two hosts: a linear layer, a loss, a step of SGD.

README.md beside this file has the commands for each way to start it.
"""

from __future__ import annotations

import argparse
import os
import socket
import time

import torch
import torch.distributed as dist
from torch import nn

from ddpobs import DistributedDataParallel


def main(arguments: list[str] | None = None) -> None:
    """Train, and print the losses of this rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--init", default="env://", help="env:// (torchrun), tcp://HOST:PORT, file:///PATH or mpi://")
    parser.add_argument("--rank", type=int, default=-1, help="with tcp:// and file://")
    parser.add_argument("--world-size", type=int, default=-1, help="with tcp:// and file://")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=10, help="of the layer")
    parser.add_argument("--slow-host", help="name of a host whose ranks work 20 ms longer in each step")
    options = parser.parse_args(arguments)
    backend = "gloo"
    if options.init == "mpi://":
        import ddpobs.mpi

        backend = ddpobs.mpi.BACKEND
    dist.init_process_group(backend, init_method=options.init, rank=options.rank, world_size=options.world_size)
    torch.set_num_threads(1)
    rank, host = dist.get_rank(), socket.gethostname()
    print(f"rank {rank} of {dist.get_world_size()} on {host}, local rank {os.environ.get('LOCAL_RANK', '0')}")

    ddp_model = DistributedDataParallel(nn.Linear(options.width, options.width))
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)
    torch.manual_seed(rank)
    for step in range(options.steps):
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(20, options.width))
        if host == options.slow_host:
            time.sleep(0.02)
        loss = loss_fn(outputs, torch.randn(20, options.width))
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"rank {rank} step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
