"""The plot of `convergence`: the loss by iteration, with a panel for each batch, readable in black and white."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper.convergence import RATES
from benchmarks.paper.losses import BLOCK

_LINES = ("-", "--", "-.", ":", (0, (1, 4)), (0, (8, 3)))
_MARKERS = "osv^DX"
_EVERY = 5
"""Blocks between the intervals of a line."""


def draw_losses(results: dict[str, Any], path: Path) -> None:
    """Draw medians over the seeds, with whiskers from the smallest to the largest, into a file of its name's kind."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = results["found"]
    figure = Figure(figsize=(6.5 * len(found), 5), layout="constrained")
    FigureCanvasAgg(figure)
    claims = {8: "claim 11 (a): all alike", 256: "claim 11 (b): every 8 ends highest"}
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, (batch, rate), trainings in zip(panels, RATES.items(), found.values(), strict=True):
        for number, (title, runs) in enumerate(trainings.items()):
            losses = np.array([run["loss"] for run in runs])
            middle = np.median(losses, axis=0)
            iterations = BLOCK * (np.arange(len(middle)) + 0.5)
            shade = f"{0.12 * number:.2f}"
            axes.plot(iterations, middle, linestyle=_LINES[number], color=shade)
            own = slice(number % _EVERY, None, _EVERY)  # The whiskers of two lines stand beside each other.
            ends = np.abs(np.array([losses.min(axis=0), losses.max(axis=0)]) - middle)[:, own]
            axes.errorbar(
                iterations[own],
                middle[own],
                ends,
                fmt=_MARKERS[number],
                color=shade,
                markersize=4,
                capsize=2,
                linewidth=0.8,
                label=title,
            )
        axes.set_title(f"batch {batch}, learning rate {rate} ({claims[batch]})", fontsize="medium")
        axes.set_yscale("log")
        axes.set_xlabel("iteration, a batch on each rank")
        axes.set_ylabel("training loss, mean of 20 iterations")
        axes.legend(fontsize="small")
    figure.suptitle("Loss with gradients reduced after every n batches, and with fewer bits")
    figure.savefig(path, bbox_inches="tight")
