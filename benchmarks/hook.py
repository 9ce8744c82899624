"""What one gradient and one bucket cost in the reducer, ours and torch's, and whether anything grows with the steps.

    python -m benchmarks.hook [--rounds 60] [--json FILE]

One rank, so that an all-reduce is next to nothing. A single autograd node hands out the gradients of 1,000 parameters
of four elements, and the same backward without DDP is subtracted. With one bucket the rest is the cost of a gradient
(hook, copy into the bucket, and its share of what a step costs anyway); what 100 buckets take longer is the cost of a
bucket. Variants run in processes of their own, in turns; medians over rounds, with the middle half of the rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.teams import Steps, Team
from benchmarks.variants import NOBODY
from ddpobs import DistributedDataParallel, TelemetryConfig, telemetry

PARAMETERS, ELEMENTS, BUCKETS = 1000, 4, 100
_LOOK, _LOOKS = 1, 10
"""A turn of that many steps, and about how many of them."""
MANY_MB = PARAMETERS / BUCKETS * ELEMENTS * 4 / 2**20

Measured = dict[tuple[str, int], list[Any]]
Wrap = Callable[[nn.Module, float, Path], nn.Module]
VARIANTS: dict[str, Wrap] = {
    "bare": lambda module, _cap, _folder: module,
    "torch": lambda module, cap, _: TorchDDP(module, bucket_cap_mb=cap),
    "torch, views": lambda module, cap, _: TorchDDP(module, bucket_cap_mb=cap, gradient_as_bucket_view=True),
    "ours, telemetry off": lambda module, cap, _: DistributedDataParallel(module, bucket_cap_mb=cap, telemetry=False),
    "ours, telemetry on": lambda module, cap, folder: DistributedDataParallel(
        module, bucket_cap_mb=cap, telemetry=TelemetryConfig(collector=NOBODY, spool=folder)
    ),
}
"""Module, bucket cap in MB and a folder to the module that is trained."""


class _HandOut(torch.autograd.Function):
    """Gives each parameter a fresh gradient and computes nothing."""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.count = len(parameters)
        return start.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return (None, *torch.zeros(ctx.count, ELEMENTS).clone().unbind())


class Fan(nn.Module):
    """A thousand small parameters behind one node of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(ELEMENTS) for _ in range(PARAMETERS))

    def forward(self, start: torch.Tensor) -> torch.Tensor:
        """One output that depends on all of them."""
        handed_out: torch.Tensor = _HandOut.apply(start, *self.parts)  # type: ignore[no-untyped-call]
        return handed_out


def prepare(wrap: Wrap, cap_mb: float, folder: Path) -> Steps:
    """Steps without an optimizer; after `_LOOK` of them the note is how many blocks of memory the interpreter holds."""
    logging.disable(logging.WARNING)
    module = wrap(Fan(), cap_mb, folder)
    start = torch.zeros(1)

    def steps(count: int) -> int:
        for _ in range(count):
            for parameter in module.parameters():
                parameter.grad = None
            module(start).sum().backward()
        return _blocks() if count == _LOOK else 0

    steps(4)
    return steps


def _blocks() -> int:
    """Without what waits to be sent, which comes and goes."""
    process = telemetry._process
    while process is not None:
        process._journal.catch_up()
        with process._exporter._work_lock:  # Not while the thread has some of it in its hands.
            if not process._exporter._queue:
                break
        time.sleep(0.05)
    gc.collect()
    return sys.getallocatedblocks()


def measure(rounds: int, steps: int) -> tuple[Measured, Measured]:
    """By variant and number of buckets: nanoseconds a step of each round, and blocks held at `_LOOKS` times."""
    order = random.Random(0)
    took_ns: Measured = {}
    blocks: Measured = {}
    with ExitStack() as stack:
        made: dict[tuple[str, int], Team] = {}
        for name, wrap in VARIANTS.items():
            for buckets, cap_mb in ((1, 25.0), (BUCKETS, MANY_MB)):
                folder = Path(stack.enter_context(TemporaryDirectory()))
                made[name, buckets] = Team(1, partial(prepare, wrap, cap_mb, folder))
                stack.callback(made[name, buckets].disband)
        for number in range(rounds):
            for key in order.sample(list(made), len(made)):
                took_ns.setdefault(key, []).append(1e9 * made[key].run(steps)[0])
                if number % max(1, rounds // _LOOKS) == 0:
                    made[key].run(_LOOK)
                    blocks.setdefault(key, []).append(made[key].notes[0])
    return took_ns, blocks


def summarise(took_ns: Measured, blocks: Measured, steps: int) -> dict[str, dict[str, list[float]]]:
    """By variant: the cost of a gradient and of a bucket as [median, lower and upper quartile], and what grows.

    Growth is from the median of the first half of the looks to that of the second, over the steps in between.
    """
    found: dict[str, dict[str, list[float]]] = {}
    bare = np.array(took_ns["bare", 1])
    for name in list(VARIANTS)[1:]:
        one, many = np.array(took_ns[name, 1]), np.array(took_ns[name, BUCKETS])
        held = blocks[name, BUCKETS]
        half = len(held) // 2
        between = half * max(1, len(one) // _LOOKS) * steps
        found[name] = {
            "gradient_ns": _quartiles((one - bare) / PARAMETERS),
            "bucket_ns": _quartiles((many - one) / (BUCKETS - 1)),
            "blocks_a_step": [float(np.median(held[half:]) - np.median(held[:half])) / between],
        }
    return found


def _quartiles(values: Any) -> list[float]:
    return [float(value) for value in np.percentile(values, [50, 25, 75])]


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """Markdown."""
    lines = ["| | a gradient, ns | a bucket, ns | memory blocks that stay, a step |", "|---|---|---|---|"]
    for name, row in found.items():
        costs = [
            f"{middle:,.0f} [{low:,.0f}, {high:,.0f}]" for middle, low, high in (row["gradient_ns"], row["bucket_ns"])
        ]
        lines.append(f"| {name} | {costs[0]} | {costs[1]} | {row['blocks_a_step'][0]:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=20, help="of a turn; default: %(default)s")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    if options.smoke:
        options.rounds, options.steps = 2, 2
    torch.set_num_threads(1)
    found = summarise(*measure(options.rounds, options.steps), options.steps)
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
