"""Measure the accuracy cost of each communication strategy: steps until a real training reaches the same loss.

    python -m benchmarks.accuracy [--seeds 5] [--loss 0.05] [--json FILE]

An MLP trains on scikit-learn's handwritten digits, on two ranks. For each seed every strategy begins with the same
parameters and gets the same batches. It trains until the mean loss of an epoch, over both ranks, is at most `--loss`.
The table has the number of steps against the plain all-reduce, and the accuracy on the test digits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch._dynamo  # The first optimizer imports it: once here, and not in every rank.
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.parameter_server import ParameterServer
from benchmarks.teams import Steps, Team
from ddpobs import DistributedDataParallel
from ddpobs.comm import PowerSGD

PLAIN = "plain all-reduce"
RANKS, BATCH, TRAINING = 2, 32, 1536
STEPS_AN_EPOCH = TRAINING // BATCH // RANKS
CAP_MB = 0.1
"""Gives four buckets, so that round-robin has buckets to distribute."""

Arguments = dict[str, Any]
"""Arguments of `DistributedDataParallel`."""
STRATEGIES: dict[str, Arguments] = {
    PLAIN: {},
    "fp16": {"comm": "fp16"},
    "bf16": {"comm": "bf16"},
    "int8": {"comm": "int8"},
    "top-k, 10 %": {"comm": "topk:0.1"},
    "top-k, 1 %": {"comm": "topk:0.01"},
    "PowerSGD, rank 4": {"comm": partial(PowerSGD, rank=4, start_iteration=10)},
    "PowerSGD, rank 1": {"comm": partial(PowerSGD, rank=1, start_iteration=10)},
    "round-robin, 3 groups": {"round_robin_groups": 3},
    "parameter server": {"comm": ParameterServer},
}


def prepare(arguments: Arguments, seed: int, loss: float) -> Steps:
    """Return the training. Its note holds the number of steps (None if it never reached the loss) and the accuracy."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    ddp = DistributedDataParallel(net, bucket_cap_mb=CAP_MB, **arguments)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    order = torch.Generator().manual_seed(seed)

    def train(epochs: int) -> tuple[int | None, float]:
        steps = None
        for epoch in range(epochs):
            if _epoch(ddp, optimizer, images, labels, order) <= loss:
                steps = (epoch + 1) * STEPS_AN_EPOCH
                break
        with torch.no_grad():
            right = (net(images[TRAINING:]).argmax(1) == labels[TRAINING:]).float().mean()
        return steps, right.item()

    return train


def _epoch(
    ddp: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    labels: torch.Tensor,
    order: torch.Generator,
) -> float:
    """Train one epoch, and return its mean loss over all ranks."""
    indices = torch.randperm(TRAINING, generator=order)[dist.get_rank() :: RANKS]
    total = torch.zeros(())
    for rows in indices.split(BATCH):
        optimizer.zero_grad()
        loss = cross_entropy(ddp(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / RANKS / STEPS_AN_EPOCH


def measure(
    names: Sequence[str], seeds: int, loss: float, epochs: int, done: Callable[[str], None]
) -> dict[str, list[Any]]:
    """Train every strategy with every seed.

    Returns:
        By strategy, the note of each seed's training.
    """
    outcomes: dict[str, list[Any]] = {}
    for name in names:
        for seed in range(seeds):
            team = Team(RANKS, partial(prepare, STRATEGIES[name], seed, loss))
            try:
                team.run(epochs)
                outcomes.setdefault(name, []).append(team.notes[0])
            finally:
                team.disband()
        done(name)
    return outcomes


def table(by_strategy: dict[str, list[Any]], loss: float) -> str:
    """Return a Markdown table of medians over the seeds, with minimum and maximum."""
    head = f"| | steps to a loss of {loss}, plain = 1 | test digits read, percentage points over plain |"
    lines = [head, "|---|---|---|"]
    for name, outcomes in by_strategy.items():
        pairs = list(zip(outcomes, by_strategy[PLAIN], strict=True))
        steps = [took / plain for (took, _), (plain, _) in pairs if took and plain]
        lost = len(pairs) - len(steps)
        cell = f"{median(steps):.2f} [{min(steps):.2f}, {max(steps):.2f}]" if steps else ""
        cell += f"; {lost} of {len(pairs)} never reached it" if lost else ""
        points = [100 * (right - plain) for (_, right), (_, plain) in pairs]
        lines.append(f"| {name} | {cell} | {median(points):+.1f} [{min(points):+.1f}, {max(points):+.1f}] |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--loss", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=150, help="most epochs; default: %(default)s")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    names = list(STRATEGIES)
    if options.smoke:
        names, options.seeds, options.epochs = names[::4], 1, 1
    torch.set_num_threads(1)
    outcomes = measure(
        names, options.seeds, options.loss, options.epochs, lambda name: print(f"{name}: done", flush=True)
    )
    print("\n" + table(outcomes, options.loss))
    if options.json:
        options.json.write_text(json.dumps({"loss": options.loss, "found": outcomes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
