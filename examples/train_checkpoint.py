"""The checkpoints of torch's DDP tutorial: rank 0 saves, all ranks wait, load and go on.

    ddpobs run -- torchrun --nproc-per-node 2 examples/train_checkpoint.py --checkpoint model.pt

If the file exists, the training goes on from it: the second start makes the steps after those of the first.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

ROWS = 64


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Save the training on rank 0, and wait on the others until the file is whole."""
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        part = path.with_suffix(".part")
        torch.save(state, part)
        part.replace(path)  # A killed training leaves the checkpoint before.
    dist.barrier()


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Load the training onto a rank's own device, and return the number of its steps."""
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def main() -> None:
    """Train, and print each checkpoint and the last loss."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    options.add_argument("--steps", type=int, default=120, help="of this start")
    options.add_argument("--every", type=int, default=30, help="steps between checkpoints")
    options.add_argument("--width", type=int, default=1024, help="of both layers")
    arguments = options.parse_args()
    width = arguments.width
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    device = torch.device("cpu")  # With GPUs: torch.device("cuda", local_rank)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).to(device)
    ddp_model = DistributedDataParallel(module)
    optimizer = torch.optim.Adam(ddp_model.parameters(), lr=1e-3)
    first = 0
    if arguments.checkpoint.exists():
        first = load(arguments.checkpoint, ddp_model, optimizer, device)
        print(f"rank {rank}: goes on after step {first}", flush=True)
    for step in range(first + 1, first + arguments.steps + 1):
        inputs = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(2 * step + rank))
        optimizer.zero_grad()
        loss = mse_loss(ddp_model(inputs), inputs.sin())
        loss.backward()
        optimizer.step()
        if step % arguments.every == 0:
            save(arguments.checkpoint, ddp_model, optimizer, step)
    print(f"rank {rank}: loss {loss.item():.6f} at step {step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
