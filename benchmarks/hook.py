"""Measure the cost of a gradient and of a bucket in the reducer, ours and torch's, and growth with the steps.

    python -m benchmarks.hook [--rounds 60] [--json FILE]

One rank, so that an all-reduce costs next to nothing. A single autograd node returns the gradients of 1,000 parameters
of four elements. The time of the same backward without DDP is subtracted. With one bucket, the rest is the cost of a
gradient: hook, copy into the bucket, and its share of a step's fixed cost. The extra time with 100 buckets is the cost
of a bucket. Variants run in their own processes, in turns; figures are medians with the middle half of the rounds.
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
from benchmarks.variants import NO_COLLECTOR
from ddpobs import DistributedDataParallel, TelemetryConfig, telemetry

PARAMETERS, ELEMENTS, BUCKETS = 1000, 4, 100
_LOOK, _LOOKS = 1, 10
"""Steps of a turn that counts memory blocks, and the approximate number of such turns."""
MANY_MB = PARAMETERS / BUCKETS * ELEMENTS * 4 / 2**20

ByVariant = dict[tuple[str, int], list[Any]]
Wrap = Callable[[nn.Module, float, Path], nn.Module]
VARIANTS: dict[str, Wrap] = {
    "bare": lambda module, _cap, _folder: module,
    "torch": lambda module, cap, _: TorchDDP(module, bucket_cap_mb=cap),
    "torch, views": lambda module, cap, _: TorchDDP(module, bucket_cap_mb=cap, gradient_as_bucket_view=True),
    "ours, telemetry off": lambda module, cap, _: DistributedDataParallel(module, bucket_cap_mb=cap, telemetry=False),
    "ours, telemetry on": lambda module, cap, folder: DistributedDataParallel(
        module, bucket_cap_mb=cap, telemetry=TelemetryConfig(collector=NO_COLLECTOR, spool=folder)
    ),
}
"""Wrap a module, given the bucket cap in MB and a folder."""


class _FreshGradients(torch.autograd.Function):
    """Returns a fresh gradient for each parameter and computes nothing."""

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
        """Return one output that depends on all parameters."""
        output: torch.Tensor = _FreshGradients.apply(start, *self.parts)  # type: ignore[no-untyped-call]
        return output


def prepare(wrap: Wrap, cap_mb: float, folder: Path) -> Steps:
    """Return steps without an optimizer. After `_LOOK` steps the note is the interpreter's count of memory blocks."""
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
    """Count memory blocks once no record waits to be sent, because the queue's length varies."""
    process = telemetry._process
    while process is not None:
        process._journal.entries.catch_up()
        with process._exporter._work_lock:  # Not while the thread handles records.
            if not process._exporter._queue:
                break
        time.sleep(0.05)
    gc.collect()
    return sys.getallocatedblocks()


def measure(rounds: int, steps: int) -> tuple[ByVariant, ByVariant]:
    """Return nanoseconds a step of each round, and memory blocks at `_LOOKS` times."""
    order = random.Random(0)
    step_ns: ByVariant = {}
    blocks: ByVariant = {}
    with ExitStack() as stack:
        teams: dict[tuple[str, int], Team] = {}
        for name, wrap in VARIANTS.items():
            for buckets, cap_mb in ((1, 25.0), (BUCKETS, MANY_MB)):
                folder = Path(stack.enter_context(TemporaryDirectory()))
                teams[name, buckets] = Team(1, partial(prepare, wrap, cap_mb, folder))
                stack.callback(teams[name, buckets].disband)
        for number in range(rounds):
            for key in order.sample(list(teams), len(teams)):
                step_ns.setdefault(key, []).append(1e9 * teams[key].run(steps)[0])
                if number % max(1, rounds // _LOOKS) == 0:
                    teams[key].run(_LOOK)
                    blocks.setdefault(key, []).append(teams[key].notes[0])
    return step_ns, blocks


def summarise(step_ns: ByVariant, blocks: ByVariant, steps: int) -> dict[str, dict[str, list[float]]]:
    """Compute the cost of a gradient and of a bucket as [median, lower and upper quartile], and the growth.

    Growth is the difference between the median block counts of the first and the second half, over the steps between.
    """
    costs: dict[str, dict[str, list[float]]] = {}
    bare = np.array(step_ns["bare", 1])
    for name in list(VARIANTS)[1:]:
        one_bucket, many_buckets = np.array(step_ns[name, 1]), np.array(step_ns[name, BUCKETS])
        block_counts = blocks[name, BUCKETS]
        half = len(block_counts) // 2
        steps_between = half * max(1, len(one_bucket) // _LOOKS) * steps
        costs[name] = {
            "gradient_ns": _quartiles((one_bucket - bare) / PARAMETERS),
            "bucket_ns": _quartiles((many_buckets - one_bucket) / (BUCKETS - 1)),
            "blocks_a_step": [float(np.median(block_counts[half:]) - np.median(block_counts[:half])) / steps_between],
        }
    return costs


def _quartiles(values: Any) -> list[float]:
    return [float(value) for value in np.percentile(values, [50, 25, 75])]


def table(results: dict[str, dict[str, list[float]]]) -> str:
    """Return a Markdown table."""
    lines = ["| | a gradient, ns | a bucket, ns | memory blocks that stay, a step |", "|---|---|---|---|"]
    for name, row in results.items():
        costs = [
            f"{middle:,.0f} [{low:,.0f}, {high:,.0f}]" for middle, low, high in (row["gradient_ns"], row["bucket_ns"])
        ]
        lines.append(f"| {name} | {costs[0]} | {costs[1]} | {row['blocks_a_step'][0]:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=20, help="steps of a turn; default: %(default)s")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    if options.smoke:
        options.rounds, options.steps = 2, 2
    torch.set_num_threads(1)
    results = summarise(*measure(options.rounds, options.steps), options.steps)
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
