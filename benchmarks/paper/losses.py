"""The tables of `convergence`: each training's last loss against that of reducing every batch, and the claims."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.pairs import Ratio, ratio
from benchmarks.tables import change, rows_of

BLOCK = 20
"""Iterations whose mean loss is kept."""
Result = dict[str, Any]
Found = dict[str, dict[str, list[Result]]]
"""By the batch and by the training's title, its result with each seed."""
_FIRST = "every 1"
_CLAIMS = {
    "batch 8": ("every 8", "figure 11 (a) (unchecked): at batch 8, reducing every 8 batches costs little", 0.0, 1.1),
    "batch 256": ("every 8", "figure 11 (b) (unchecked): at batch 256 it ends with a larger loss", 1.0, float("inf")),
}
"""By batch: the training, its claim, and the ratios of last losses that agree with it."""
_FEWER_BITS = ("int8", "top-k, 1 %")


def last_loss(result: Result) -> float:
    """Return the mean loss of the last quarter of the iterations."""
    losses = result["loss"]
    return float(np.mean(losses[-max(1, len(losses) // 4) :]))


def against_first(trainings: dict[str, list[Result]], title: str) -> Ratio:
    """Return a training's last loss over that of the first, with the interval over seeds."""
    return ratio(*([[last_loss(result)] for result in trainings[name]] for name in (title, _FIRST)))


def table(found: Found) -> str:
    """Return a row for each training."""
    rows = []
    for batch, trainings in found.items():
        for title, results in trainings.items():
            pairs = zip(results, trainings[_FIRST], strict=True)
            points = np.median([100 * (one["read"] - first["read"]) for one, first in pairs])
            last = np.median([last_loss(result) for result in results])
            against = "" if title == _FIRST else str(against_first(trainings, title))
            rows.append([batch, title, f"{last:.4f}", against, f"{points:+.1f}"])
    return rows_of(["", "", "last loss", f"of {_FIRST}", "digits read, points more"], rows)


def claims(found: Found) -> list[list[str]]:
    """Return a row for each claim with its verdict, and one for each strategy with fewer bits."""
    rows = []
    for batch, trainings in found.items():
        title, source, low, high = _CLAIMS[batch]
        measured = against_first(trainings, title)
        if low <= measured.low and measured.high <= high:
            verdict = "holds"
        else:
            verdict = "does not hold here" if measured.high < low or measured.low > high else "open"
        rows.append([source, f"digits, {batch}", f"{title} against {_FIRST}: {change(measured)}", verdict])
        for name in [name for name in _FEWER_BITS if name in trainings]:
            cell = f"{name} against {_FIRST}: {change(against_first(trainings, name))}"
            rows.append(["6.2.3: fewer bits (no figure is claimed)", f"digits, {batch}", cell, ""])
    return rows
