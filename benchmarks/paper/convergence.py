"""Repeat figure 11 of the DDP paper: the loss by iteration, with gradients reduced after every 1, 2, 4 or 8 batches.

    python -m benchmarks.paper.convergence [--seeds 5] [--iterations 300] [--json FILE] [--smoke]

A small convolutional network reads scikit-learn's digits on two ranks, with the paper's batches and learning rates. An
iteration is a batch on each rank. The gradients between two reductions add up, and the learning rate stays. With a
seed, all trainings begin with the same parameters and get the same batches. At batch 8, strategies that send fewer bits
train beside them. No time is measured.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # The first optimizer imports it: once here, and not in every rank.
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from benchmarks.paper.losses import BLOCK, Found, claims, table
from benchmarks.paper.tables import CLAIMS_HEAD
from benchmarks.source import facts, keep
from benchmarks.tables import rows_of
from benchmarks.teams import Steps, Team
from ddpobs import DistributedDataParallel

RANKS, TRAINING = 2, 1536
RATES = {8: 0.02, 256: 0.06}
"""The paper's learning rate by its batch: images on each rank in an iteration."""
_MEASURED = ("ddpobs/reducer", "ddpobs/buckets", "ddpobs/comm", "benchmarks/paper/convergence.py")


@dataclass(frozen=True)
class Training:
    """One training of the figure.

    Attributes:
        title: Its name in tables and plots.
        batches: Batches between reductions.
        comm: The communication strategy.
    """

    title: str
    batches: int = 1
    comm: str = "all_reduce"


_SELDOM = tuple(Training(f"every {batches}", batches) for batches in (1, 2, 4, 8))
_FEWER_BITS = (Training("int8", comm="int8"), Training("top-k, 1 %", comm="topk:0.01"))
TRAININGS = {8: (*_SELDOM, *_FEWER_BITS), 256: _SELDOM}
"""By batch."""


def network() -> nn.Module:
    """Two convolutions with batch norms, and a linear layer: images [n, 1, 8, 8] to 10 classes."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )


def prepare(seed: int) -> Steps:
    """Return the trainings with a seed. The note has their losses and the shares of test digits that they read."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))

    def train(iterations: int) -> dict[str, dict[str, Any]]:
        return {
            f"batch {batch}": {
                training.title: _trained(training, batch, seed, iterations, data) for training in trainings
            }
            for batch, trainings in TRAININGS.items()
        }

    return train


def _trained(training: Training, batch: int, seed: int, iterations: int, data: TensorDataset) -> dict[str, Any]:
    """Train; return the mean loss of both ranks in each block of iterations, and the share of test digits read."""
    images, labels = data.tensors
    torch.manual_seed(seed)
    net = network()
    ddp = DistributedDataParallel(net, comm=training.comm, telemetry=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=RATES[batch])
    order = torch.Generator().manual_seed(seed)
    losses = torch.zeros(iterations)
    for iteration in range(iterations):
        rows = torch.randperm(TRAINING, generator=order)[dist.get_rank() :: RANKS][:batch]
        reduces = iteration % training.batches == training.batches - 1
        with nullcontext() if reduces else ddp.no_sync():
            loss = cross_entropy(ddp(images[rows]), labels[rows])
            loss.backward()
        losses[iteration] = loss.detach()
        if reduces:
            optimizer.step()
            optimizer.zero_grad()
    dist.all_reduce(losses)
    net.eval()
    with torch.no_grad():
        read = (net(images[TRAINING:]).argmax(1) == labels[TRAINING:]).float().mean()
    blocks = (losses / RANKS).view(-1, BLOCK).mean(1)
    return {"loss": [float(f"{loss:.5g}") for loss in blocks.tolist()], "read": round(read.item(), 4)}


def main() -> None:
    """Train with each seed, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=300, help=f"a multiple of {BLOCK}")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    if options.smoke:
        options.seeds, options.iterations = 2, BLOCK
    if options.iterations % BLOCK:
        parser.error(f"--iterations: expected a multiple of {BLOCK}, got {options.iterations}")
    torch.set_num_threads(1)
    found: Found = {}
    results = facts(*_MEASURED) | {"experiment": "convergence", "iterations": options.iterations, "found": found}
    for seed in range(options.seeds):
        team = Team(RANKS, partial(prepare, seed))
        try:
            team.run(options.iterations)
            for batch, trainings in team.notes[0].items():
                for title, result in trainings.items():
                    found.setdefault(batch, {}).setdefault(title, []).append(result)
        finally:
            team.disband()
        keep(results, options.json)
        print(f"seed {seed + 1} of {options.seeds}", file=sys.stderr, flush=True)
    print(table(found) + "\n" + rows_of(CLAIMS_HEAD, claims(found)))


if __name__ == "__main__":
    main()
