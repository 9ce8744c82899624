"""Repeat figure 11 of the DDP paper: the loss by iteration, with gradients reduced after every 1, 2, 4 or 8 batches.

    python -m benchmarks.paper.convergence [--seeds 5] [--iterations 400] [--json FILE] [--smoke]

A small convolutional network reads scikit-learn's digits on two ranks, with the paper's batches and learning rates. An
iteration is a batch on each rank. The gradients between two reductions add up, and the learning rate stays. With a seed,
all trainings begin with the same parameters and get the same batches. Strategies that send fewer bits train beside
them. No time is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # The first optimizer imports it: once here, and not in every rank.
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.pairs import Ratio, ratio
from benchmarks.source import facts, keep
from benchmarks.tables import rows_of
from benchmarks.teams import Steps, Team
from ddpobs import DistributedDataParallel

RANKS, TRAINING = 2, 1536
BLOCK = 20
"""Iterations whose mean loss is kept."""
RATES = {8: 0.02, 256: 0.06}
"""The paper's learning rate by its batch: images on each rank in an iteration."""
_MEASURED = ("ddpobs/reducer", "ddpobs/buckets", "ddpobs/comm", "benchmarks/paper/convergence.py")
Found = dict[str, dict[str, list[dict[str, Any]]]]
"""By the batch and by the training's title, its result with each seed."""


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


TRAININGS = (
    *(Training(f"every {batches}", batches) for batches in (1, 2, 4, 8)),
    Training("int8", comm="int8"),
    Training("top-k, 1 %", comm="topk:0.01"),
)
_FIRST = TRAININGS[0].title
_CLAIMS = {
    "batch 8": ("figure 11 (a) (unchecked): reducing every 8 batches costs little", 0.0, 1.1),
    "batch 256": ("figure 11 (b) (unchecked): every 8 ends with a larger loss", 1.0, float("inf")),
}
"""By batch: the claim about `every 8`, and the ratios of the last losses that agree with it."""


def network() -> nn.Module:
    """Two convolutions with batch norms, and a linear layer: images [n, 1, 8, 8] to 10 classes."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(512, 10)),
    )


def prepare(seed: int) -> Steps:
    """Return the trainings with a seed. The note has their losses and the shares of test digits that they read."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)

    def train(iterations: int) -> dict[str, dict[str, Any]]:
        return {
            f"batch {batch}": {
                training.title: _trained(training, batch, seed, iterations, images, labels) for training in TRAININGS
            }
            for batch in RATES
        }

    return train


def _trained(
    training: Training, batch: int, seed: int, iterations: int, images: torch.Tensor, labels: torch.Tensor
) -> dict[str, Any]:
    """Train; return the mean loss of both ranks in each block of iterations, and the share of test digits read."""
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


def last_loss(result: dict[str, Any]) -> float:
    """Return the mean loss of the last quarter of the iterations."""
    losses = result["loss"]
    return float(np.mean(losses[-max(1, len(losses) // 4) :]))


def against_first(found: dict[str, list[dict[str, Any]]], title: str) -> Ratio:
    """Return a training's last loss over that of the first, with the interval over seeds."""
    return ratio(*([[last_loss(result)] for result in found[name]] for name in (title, _FIRST)))


def table(found: Found) -> str:
    """Return a row for each training."""
    rows = []
    for batch, trainings in found.items():
        for title, results in trainings.items():
            against = "" if title == _FIRST else str(against_first(trainings, title))
            points = [100 * (one["read"] - first["read"]) for one, first in zip(results, trainings[_FIRST], strict=True)]
            cells = [f"{np.median([last_loss(result) for result in results]):.4f}", against, f"{np.median(points):+.1f}"]
            rows.append([batch, title, *cells])
    return rows_of(["", "", "last loss", f"of {_FIRST}", "digits read, points more"], rows)


def claims(results: dict[str, Any]) -> str:
    """Return a row for each claim, with its verdict."""
    rows = []
    for batch, trainings in results["found"].items():
        source, low, high = _CLAIMS[batch]
        measured = against_first(trainings, "every 8")
        agrees = low <= measured.low and measured.high <= high
        contradicts = measured.high < low or measured.low > high
        verdict = "holds" if agrees else "does not hold here" if contradicts else "open"
        rows.append([source, f"digits, {batch}", f"every 8: {measured}", verdict])
        for training in TRAININGS[4:]:
            against = against_first(trainings, training.title)
            rows.append(["section 6.2.3: fewer bits", f"digits, {batch}", f"{training.title}: {against}", "measured"])
    return rows_of(["claim", "measured with", f"last loss, of {_FIRST}", ""], rows)


def main() -> None:
    """Train with each seed, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=400, help=f"a multiple of {BLOCK}")
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
    print(table(found) + "\n" + claims(results))


if __name__ == "__main__":
    main()
