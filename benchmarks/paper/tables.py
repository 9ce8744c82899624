"""The table of an experiment's results, with a verdict on each claim."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.pairs import Ratio, ratio
from benchmarks.paper.experiments import EXPERIMENTS, Claim, Experiment
from benchmarks.paper.models import PAPER_MODELS
from benchmarks.tables import change, rows_of

CLAIMS_HEAD = ["claim", "measured with", "a batch, or the last loss, %", ""]
"""Head of a table of claims."""
FORWARD, BACKWARD, OPTIMIZER, STEP = range(4)
"""Columns of a launch's seconds."""
Launches = list[dict[str, Any]]


def batch_s(experiment: Experiment, title: str, launches: Launches) -> list[list[float]]:
    """Return the seconds a batch of each step, by launch."""
    batches = experiment.variant(title).batches
    return [[step[STEP] / batches for step in launch["seconds"]] for launch in launches]


def medians_s(launches: Launches) -> list[float]:
    """Return the median seconds of a step's parts over all launches."""
    return [float(part) for part in np.median([step for launch in launches for step in launch["seconds"]], axis=0)]


def against(experiment: Experiment, found: dict[str, Launches], title: str, base: str = "") -> Ratio:
    """Return the time of a batch over that of another variant, the first if not named, in the rounds with both."""
    base = base or experiment.variants[0].title
    rounds = min(len(found[title]), len(found[base]))
    return ratio(
        [[float(np.median(launch))] for launch in batch_s(experiment, title, found[title][:rounds])],
        [[float(np.median(launch))] for launch in batch_s(experiment, base, found[base][:rounds])],
    )


def verdict(claim: Claim, measured: Ratio) -> str:
    """Return whether the whole interval agrees with the claim."""
    if claim.low <= measured.low and measured.high <= claim.high:
        return "holds"
    return "does not hold here" if measured.high < claim.low or measured.low > claim.high else "open"


def table(results: dict[str, Any]) -> str:
    """Return a row for each variant on each link."""
    experiment = EXPERIMENTS[results["experiment"]]
    first = experiment.variants[0].title
    rows = []
    for setting, found in results["settings"].items():
        for variant in experiment.measured(found):
            launches = found[variant.title]
            parts = [f"{1e3 * part:.1f}" for part in medians_s(launches)[:STEP]]
            median_s = np.median(np.concatenate(batch_s(experiment, variant.title, launches)))
            peak_mb = np.median([launch["peak_mb"] for launch in launches])
            relative = "" if variant.title == first else str(against(experiment, found, variant.title))
            cells = [*parts, f"{1e3 * median_s:.1f}", relative, f"{peak_mb:,.0f}", str(len(launches))]
            rows.append([place(setting), variant.title, *cells])
    parts = ["forward, ms", "backward, ms", "optimizer, ms"]
    head = ["model, link", "", *parts, "a batch, ms", f"a batch, of {first}", "memory, MB", "launches"]
    return rows_of(head, rows)


def claims(results: dict[str, Any]) -> list[list[str]]:
    """Return a row for each claim on each link, with its verdict. A claim about another model has none."""
    experiment = EXPERIMENTS[results["experiment"]]
    rows = []
    for setting, found in results["settings"].items():
        for claim in experiment.claims_about(setting.partition(", ")[0], found):
            measured = against(experiment, found, claim.variant, claim.base)
            base = claim.base or experiment.variants[0].title
            compared = f"{claim.variant} against {base}: {change(measured)}"
            rows.append([claim.source, place(setting), compared, verdict(claim, measured)])
    return rows


def place(setting: str) -> str:
    """Return model and link, as a reader knows them."""
    model, _, rate = setting.partition(", ")
    return f"{PAPER_MODELS[model].title}, {rate}"
