"""What each way of handling a full bucket costs in accuracy: steps until a real training has the same loss.

    python -m benchmarks.accuracy [--seeds 5] [--loss 0.05] [--json FILE]

An MLP on scikit-learn's handwritten digits, on two ranks. For each seed every way begins with the same parameters and
sees the same batches; it trains until the mean loss of an epoch, over both ranks, is at most `--loss`. Printed are the
steps that it took against the plain all-reduce, and how many of the digits kept for the test it then reads.
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

from benchmarks.teams import Steps, Team
from ddpobs import DistributedDataParallel
from ddpobs.comm import PowerSGD

PLAIN = "plain all-reduce"
RANKS, BATCH, TRAINING = 2, 32, 1536
STEPS_AN_EPOCH = TRAINING // BATCH // RANKS
CAP_MB = 0.1
"""Four buckets, or there would be nothing to deal out."""

Way = dict[str, Any]
WAYS: dict[str, Way] = {
    PLAIN: {},
    "fp16": {"comm": "fp16"},
    "bf16": {"comm": "bf16"},
    "int8": {"comm": "int8"},
    "top-k, 10 %": {"comm": "topk:0.1"},
    "top-k, 1 %": {"comm": "topk:0.01"},
    "PowerSGD, rank 4": {"comm": partial(PowerSGD, rank=4, start_iteration=10)},
    "PowerSGD, rank 1": {"comm": partial(PowerSGD, rank=1, start_iteration=10)},
    "round-robin, 3 groups": {"round_robin_groups": 3},
    "parameter server": {"comm": "parameter_server"},
}


def prepare(way: Way, seed: int, loss: float) -> Steps:
    """The training; its note is how many steps it took, None if it never came there, and the test's share."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    ddp = DistributedDataParallel(net, bucket_cap_mb=CAP_MB, **way)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    order = torch.Generator().manual_seed(seed)

    def train(epochs: int) -> tuple[int | None, float]:
        took = None
        for epoch in range(epochs):
            if _epoch(ddp, optimizer, images, labels, order) <= loss:
                took = (epoch + 1) * STEPS_AN_EPOCH
                break
        with torch.no_grad():
            right = (net(images[TRAINING:]).argmax(1) == labels[TRAINING:]).float().mean()
        return took, right.item()

    return train


def _epoch(
    ddp: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    labels: torch.Tensor,
    order: torch.Generator,
) -> float:
    """The mean loss over all ranks of one pass over the training digits."""
    mine = torch.randperm(TRAINING, generator=order)[dist.get_rank() :: RANKS]
    total = torch.zeros(())
    for rows in mine.split(BATCH):
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
    """By way, what each seed's training came to."""
    found: dict[str, list[Any]] = {}
    for name in names:
        for seed in range(seeds):
            team = Team(RANKS, partial(prepare, WAYS[name], seed, loss))
            try:
                team.run(epochs)
                found.setdefault(name, []).append(team.notes[0])
            finally:
                team.disband()
        done(name)
    return found


def table(found: dict[str, list[Any]], loss: float) -> str:
    """Markdown; medians over the seeds, with the least and the most."""
    head = f"| | steps to a loss of {loss}, plain = 1 | test digits read, percentage points over plain |"
    lines = [head, "|---|---|---|"]
    for name, outcomes in found.items():
        pairs = list(zip(outcomes, found[PLAIN], strict=True))
        steps = [took / plain for (took, _), (plain, _) in pairs if took and plain]
        lost = len(pairs) - len(steps)
        shown = f"{median(steps):.2f} [{min(steps):.2f}, {max(steps):.2f}]" if steps else ""
        shown += f"; {lost} of {len(pairs)} never came there" if lost else ""
        points = [100 * (right - plain) for (_, right), (_, plain) in pairs]
        lines.append(f"| {name} | {shown} | {median(points):+.1f} [{min(points):+.1f}, {max(points):+.1f}] |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--loss", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=150, help="at most; default: %(default)s")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    names = list(WAYS)
    if options.smoke:
        names, options.seeds, options.epochs = names[::4], 1, 1
    torch.set_num_threads(1)
    found = measure(names, options.seeds, options.loss, options.epochs, lambda name: print(f"{name}: done", flush=True))
    print("\n" + table(found, options.loss))
    if options.json:
        options.json.write_text(json.dumps({"loss": options.loss, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
