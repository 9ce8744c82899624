"""Draw each experiment's newest results, with the claims of the sources, readable in black and white.

    python -m benchmarks.paper.plots [buckets …] [--results benchmarks/results/paper] [--out docs/pictures]

A box has the quartiles of all steps, its line the median, its whiskers the 5th and 95th percentile. `breakdown` has
bars of medians instead, with the whole step's percentiles; `convergence`, `operations`, `readiness` and `scaling` have
lines. A hatched band is a claim: the range of step times that agrees with it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.paper.experiments import EXPERIMENTS, FROM_25_MB, Experiment, Variant
from benchmarks.paper.loss_plot import draw_losses
from benchmarks.paper.operations import draw_operations
from benchmarks.paper.predictions import together
from benchmarks.paper.readiness import draw_readiness
from benchmarks.paper.scaling import draw_scaling
from benchmarks.paper.tables import BACKWARD, FORWARD, OPTIMIZER, STEP, Launches, batch_s, medians_s, place
from benchmarks.source import ROOT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_RESULTS, _PICTURES = ROOT / "benchmarks" / "results" / "paper", ROOT / "docs" / "pictures"
_OTHERS = {"convergence": draw_losses, "operations": draw_operations, "readiness": draw_readiness}
_ALONE = "no communication"
"""The variant of `breakdown` whose backward only computes."""


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw one experiment, with a panel for each model and link, into a file of the kind that its name says."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    experiment, settings = EXPERIMENTS[results["experiment"]], results["settings"]
    figure = Figure(figsize=(5.5 * len(settings), 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels: list[Axes] = list(figure.subplots(1, len(settings), squeeze=False)[0])
    for axes, (setting, found) in zip(panels, settings.items(), strict=True):
        axes.set_title(place(setting))
        if results["experiment"] == "scaling":
            draw_scaling(axes, found)
        else:
            titles = _in_order(experiment, found)
            axes.set_xticks(range(len(titles)), titles, rotation=30, ha="right")
            if results["experiment"] == "breakdown":
                _bars(axes, titles, found)
            else:
                _boxes(axes, experiment, titles, found)
                _predictions(axes, experiment, titles, found)
            _claims(axes, experiment, setting.partition(", ")[0], found)
            axes.set_ylim(bottom=0)
        axes.set_ylabel("seconds a batch")
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.3))
    figure.suptitle(experiment.title.replace("`", ""))
    figure.savefig(path, bbox_inches="tight")


def _in_order(experiment: Experiment, found: dict[str, Launches]) -> list[str]:
    """Return the measured variants' titles, by bucket size if they differ in it alone."""
    variants = experiment.measured(found)
    if all(replace(variant, title="", cap_mb=None, predicts=False) == Variant("") for variant in variants):
        variants.sort(key=lambda variant: variant.cap_mb or 0.0)
    return [variant.title for variant in variants]


def _boxes(axes: Axes, experiment: Experiment, titles: list[str], found: dict[str, Launches]) -> None:
    steps = [np.concatenate(batch_s(experiment, title, found[title])) for title in titles]
    axes.boxplot(
        steps,
        positions=range(len(titles)),
        whis=(5, 95),
        showfliers=False,
        medianprops={"color": "black"},
        widths=0.5,
        manage_ticks=False,
    )


def _predictions(axes: Axes, experiment: Experiment, titles: list[str], found: dict[str, Launches]) -> None:
    """Draw what a variant with telemetry predicts of the others' bucket sizes beside their boxes."""
    lines = [line for line in experiment.questions if line == FROM_25_MB]
    for variant in experiment.measured(found):
        for line in lines if variant.predicts else ():
            caps_mb = [question["bucket_cap_mb"] for question in experiment.questions[line]]
            of_cap = dict(zip(caps_mb, together(found[variant.title], line), strict=True))
            others = [
                (titles.index(each.title), each.cap_mb) for each in experiment.measured(found) if not each.predicts
            ]
            places = np.array([place for place, _ in others]) + 0.35
            middle, low, high = np.array([of_cap[cap_mb] for _, cap_mb in others]).T
            shape: dict[str, Any] = {"color": "black", "markerfacecolor": "white", "capsize": 4}
            axes.errorbar(places, middle, [middle - low, high - middle], fmt="D", **shape, label=line)


def _bars(axes: Axes, titles: list[str], found: dict[str, Launches]) -> None:
    """Stack the parts of a step; the wait for communication is what backward takes longer than without any."""
    medians = [medians_s(found[title]) for title in titles]
    computing_s = medians_s(found[_ALONE])[BACKWARD]
    parts = {
        "forward": ("white", "", [step[FORWARD] for step in medians]),
        "backward, computing": ("0.75", "", [min(step[BACKWARD], computing_s) for step in medians]),
        "backward, waiting": ("white", "xx", [max(0.0, step[BACKWARD] - computing_s) for step in medians]),
        "optimizer": ("0.4", "", [step[OPTIMIZER] for step in medians]),
    }
    below = np.zeros(len(titles))
    for name, (color, hatch, seconds) in parts.items():
        axes.bar(range(len(titles)), seconds, 0.6, below, color=color, hatch=hatch, edgecolor="black", label=name)
        below += seconds
    steps = [[step[STEP] for launch in found[title] for step in launch["seconds"]] for title in titles]
    low, middle, high = np.array([np.percentile(each, (5, 50, 95)) for each in steps]).T
    places = np.arange(len(titles)) + 0.2  # Beside the hatches' middle.
    axes.errorbar(places, middle, [middle - low, high - middle], fmt="k_", capsize=4, label="whole step, 5 to 95 %")


def _claims(axes: Axes, experiment: Experiment, model: str, found: dict[str, Launches]) -> None:
    """Draw the band of each claim around its variant; an endless one ends at the slowest step."""
    titles = _in_order(experiment, found)
    slowest_s = max(max(map(max, batch_s(experiment, title, found[title]))) for title in titles)
    sources = set[str]()
    for claim in experiment.claims_about(model, found):
        base = claim.base or experiment.variants[0].title
        base_s = float(np.median(np.concatenate(batch_s(experiment, base, found[base]))))
        low, high = claim.low, max(claim.low, min(claim.high, slowest_s / base_s))
        axes.bar(
            titles.index(claim.variant),
            (high - low) * base_s,
            0.9,
            low * base_s,
            fill=False,
            hatch="..",
            linestyle="--",
            label=None if claim.source in sources else claim.source,
        )
        sources.add(claim.source)


def main() -> None:
    """Draw all experiments that have results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="experiments; default: all that have results")
    parser.add_argument("--results", type=Path, default=_RESULTS)
    parser.add_argument("--out", type=Path, default=_PICTURES)
    options = parser.parse_args()
    for name, drawn in (dict.fromkeys(EXPERIMENTS, draw) | _OTHERS).items():
        files = sorted(options.results.glob(f"{name}-20*.json"))
        if files and name in (options.names or [name]):
            drawn(json.loads(files[-1].read_text()), options.out / f"paper-{name}.svg")
            print(f"paper-{name}.svg")


if __name__ == "__main__":
    main()
