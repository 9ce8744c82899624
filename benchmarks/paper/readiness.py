"""Repeat figure 2 (c), (d) of the DDP paper: when the gradients of ResNet-152 become ready in backward.

    python -m benchmarks.paper.readiness [--passes 20] [--json FILE] [--smoke]

One process of one thread goes forward and back. Time is that of its processor, so that other processes do not count.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.source import facts, keep
from benchmarks.tables import rows_of

QUARTERS = (25, 50, 75)


def resnet(layers: tuple[int, ...]) -> nn.Module:
    """Return a ResNet of bottlenecks: `layers` by stage."""
    from transformers import ResNetConfig, ResNetForImageClassification

    labels = {index: str(index) for index in range(1000)}
    return ResNetForImageClassification(ResNetConfig(depths=list(layers), id2label=labels))


def ready_s(module: nn.Module, passes: int) -> list[list[float]]:
    """Return the processor time from backward's begin to each gradient, in order, shape [passes, parameters].

    Two passes before warm up.
    """
    torch.set_num_threads(1)
    arrived: list[float] = []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: arrived.append(time.process_time()))
    measured = []
    for _ in range(2 + passes):
        module.zero_grad()
        loss = module(torch.randn(1, 3, 64, 64)).logits.pow(2).mean()
        arrived.clear()
        began = time.process_time()
        loss.backward()
        measured.append([round(at - began, 6) for at in arrived])
    return measured[2:]


def table(results: dict[str, Any]) -> str:
    """Return when a share of the gradients is ready, as shares of backward: median, and 5th to 95th percentile."""
    shares = _shares(results)
    count = shares.shape[1]
    cells = [_cell(shares[:, round(count * quarter / 100) - 1]) for quarter in QUARTERS]
    pause = _cell(np.diff(shares, axis=1, prepend=0.0).max(axis=1))
    head = ["gradients of ResNet-152", *(f"{quarter} % ready after" for quarter in QUARTERS), "longest pause"]
    return rows_of(head, [[str(count), *cells, pause]])


def _shares(results: dict[str, Any]) -> Any:
    ready = np.array(results["ready_s"])
    return ready / ready[:, -1:]


def _cell(shares: Any) -> str:
    low, middle, high = 100 * np.percentile(shares, (5, 50, 95))
    return f"{middle:.0f} % ({low:.0f} to {high:.0f})"


def draw_readiness(results: dict[str, Any], path: Path) -> None:
    """Draw the time of each gradient, into a file of the kind that its name says."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    low, middle, high = np.percentile(np.array(results["ready_s"]), (5, 50, 95), axis=0)
    gradients = np.arange(1, len(middle) + 1)
    axes.fill_between(gradients, low, high, color="0.8", label="5th to 95th percentile of the passes")
    axes.plot(gradients, middle, color="black", label="measured, median")
    evenly = "figure 2 (c), (d) (unchecked): all through backward"
    axes.plot(gradients, middle[-1] * gradients / len(middle), "k--", linewidth=1, label=evenly)
    axes.set_xlabel("gradients that are ready")
    axes.set_ylabel("seconds of a processor since backward began")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    figure.suptitle("Readiness of ResNet-152's gradients in backward")
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    layers = (1, 1, 1, 1) if options.smoke else (3, 8, 36, 3)
    passes = 3 if options.smoke else options.passes
    torch.manual_seed(0)
    results = facts("benchmarks/paper/readiness.py") | {"ready_s": ready_s(resnet(layers), passes)}
    print(table(results))
    keep(results, options.json)


if __name__ == "__main__":
    main()
