"""Train an encoder with a cached contrastive loss, with one rank slowed down in its nested forwards."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from ddpobs import DistributedDataParallel
from tests.support.distributed.cached_losses import Encoder, batches, cached_loss

PASSES, ROWS = 4, 8


def main() -> None:
    """Train for the number of steps on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--slow-rank", type=int)
    parser.add_argument("--slow-phase", choices=["forward"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    slow_s = 0.012 if dist.get_rank() == arguments.slow_rank else 0.0
    ddp = DistributedDataParallel(Encoder(slow_s))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for columns in batches(arguments.steps, with_loader=True):
        optimizer.zero_grad()
        cached_loss([ddp, ddp], columns, ROWS).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
