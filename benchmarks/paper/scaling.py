"""Scaling: a batch on up to 256 ranks, predicted from a launch of two ranks; the table and the plot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from benchmarks.paper.experiments import EXPERIMENTS, LINES, RANKS
from benchmarks.paper.predictions import together
from benchmarks.paper.tables import Launches, batch_s, place
from benchmarks.tables import rows_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BASE, _ALONE, _LAST = "2 ranks, 0.5 MB", "1 rank", "4 ranks"
_SHOWN = [line for line in LINES if line not in ("every 2", "every 4")]
"""Rows of the table; the plot has all lines."""
_NEAR, _DOUBLE = 1.2, 2.0
"""What we take for near-linear, and section 5.3's step on 256 GPUs, as multiples of a step of one rank."""
_STYLES = (("-", "o"), ("--", "s"), ("-.", "^"), (":", "D"), ((0, (1, 4)), "X"))


def predictions(results: dict[str, Any]) -> str:
    """Return a row for each line: the batch on more ranks, as a multiple of one rank's; measured and predicted."""
    shown = (4, 8, 256)
    rows = []
    for setting, found in results["settings"].items():
        alone_s = _median_s(found, _ALONE)
        for line in _SHOWN:
            title = _LAST if line == "every 1" else f"{_LAST}, {line}"
            measured = f"{_median_s(found, title) / alone_s:.2f}" if title in found else ""
            lines = together(found[_BASE], line) / alone_s
            cells = [_cell(lines[RANKS.index(ranks)]) for ranks in shown]
            rows.append([place(setting), line, measured, *cells])
    return rows_of(["model, link", "reduced", "4 ranks, measured", *(f"{ranks}, predicted" for ranks in shown)], rows)


def _cell(prediction: npt.NDArray[np.float64]) -> str:
    return "not known" if np.isnan(prediction).any() else "{:.2f} ({:.2f} to {:.2f})".format(*prediction)


def _median_s(found: dict[str, Launches], title: str) -> float:
    return float(np.median(np.concatenate(batch_s(EXPERIMENTS["scaling"], title, found[title]))))


def draw_scaling(axes: Axes, found: dict[str, Launches]) -> None:
    """Draw predicted lines with their intervals, measured batches beside them, and the claims."""
    from matplotlib.ticker import LogLocator, NullFormatter

    alone_s = _median_s(found, _ALONE)
    for number, (line, (style, marker)) in enumerate(zip(LINES, _STYLES, strict=True)):
        middle, low, high = together(found[_BASE], line).T
        # The intervals of two lines stand beside each other.
        ranks = np.array(RANKS) * 2 ** (0.09 * (number - 2))
        shape: dict[str, Any] = {"color": "black", "linestyle": style, "marker": marker, "markerfacecolor": "white"}
        axes.errorbar(
            ranks, middle, [middle - low, high - middle], **shape, linewidth=1, capsize=2, label=f"predicted, {line}"
        )
    for variant in EXPERIMENTS["scaling"].measured(found):
        if variant.predicts:
            continue
        steps = np.concatenate(batch_s(EXPERIMENTS["scaling"], variant.title, found[variant.title]))
        low, middle, high = np.percentile(steps, (5, 50, 95))
        marker = _STYLES[list(LINES).index(f"every {variant.batches}")][1]
        label = "measured, 5th to 95th percentile" if variant.title == _ALONE else None
        ends = [[middle - low], [high - middle]]
        axes.errorbar([variant.ranks], [middle], ends, fmt=marker, color="0.4", markersize=8, capsize=4, label=label)
    near = f"abstract: near-linear, here at most {100 * (_NEAR - 1):.0f} % longer"
    axes.axhspan(alone_s, _NEAR * alone_s, fill=False, hatch="//", edgecolor="0.5", label=near)
    double: dict[str, Any] = {"color": "black", "markerfacecolor": "white", "markersize": 16}
    axes.plot([RANKS[-1]], [_DOUBLE * alone_s], "*", **double, label="5.3 (unchecked): twice at 256 GPUs")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, *RANKS], [str(ranks) for ranks in (1, *RANKS)])
    axes.set_xlabel("ranks")
