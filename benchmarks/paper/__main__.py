"""Repeat an experiment of the DDP paper on links of a chosen speed.

    sudo python -m benchmarks.paper EXPERIMENT [--models resnet50,bert] [--rates 1gbit] [--only '25 MB;100 MB']
        [--rounds 5] [--steps 10] [--json FILE] [--smoke]

Each rank has a network namespace with one thread and a shaped link. A launch is a training of one variant, in processes
of its own. A round launches every variant once, in a new random order; the interval is that of the rounds' ratios
(`benchmarks/pairs.py`). With `--json` the rounds are added to those in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.faults.launch import ranks_of
from benchmarks.links import INTERFACE, LinkError, Links, address, links
from benchmarks.paper import half_bytes, predictions, scaling
from benchmarks.paper.experiments import EXPERIMENTS, Experiment, Variant
from benchmarks.paper.tables import CLAIMS_HEAD, claims, table
from benchmarks.rig import patience
from benchmarks.source import facts, keep, resumed
from benchmarks.tables import rows_of
from benchmarks.two_nodes import ON_LINK, mpiexec

SCRIPT = Path(__file__).with_name("training.py")
_MEASURED = (
    "ddpobs",
    "benchmarks/models.py",
    *(f"benchmarks/paper/{name}.py" for name in ("experiments", "models", "training")),
)
_TIMEOUT_S = 900
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}

Settings = dict[str, dict[str, list[dict[str, Any]]]]
"""Launches by model and rate, and by the variant's title."""


def launch(experiment: Experiment, variant: Variant, model: str, network: Links, steps: int) -> dict[str, Any]:
    """Train one variant, and return the first rank's result, with predictions if the variant makes them."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        steps = max(steps, predictions.STEPS) if variant.predicts else steps
        arguments = json.dumps({"model": model, "variant": asdict(variant), "steps": steps})
        try:
            (_over_mpi if variant.mpi else _over_gloo)(variant, arguments, folder, network)
        except RuntimeError as error:
            raise RuntimeError(f"{variant.title}, {model}, failed: {error}") from error
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return result | {"predicted": predictions.predict(folder, experiment.questions)} if variant.predicts else result


def _over_gloo(variant: Variant, arguments: str, folder: Path, network: Links) -> None:
    environ = {"GLOO_SOCKET_IFNAME": INTERFACE} | HUGE_PAGES
    with ranks_of(
        SCRIPT,
        arguments,
        ranks=variant.ranks,
        folder=folder,
        environ=environ | (predictions.environ(folder) if variant.predicts else {}),
        namespaces=network.namespaces,
        master=address(0),
    ) as ranks:
        if any(process.wait(_TIMEOUT_S) for process in ranks.processes):
            raise RuntimeError(ranks.logs())


def _over_mpi(_: Variant, arguments: str, folder: Path, network: Links) -> None:
    environ = ON_LINK | HUGE_PAGES | {"OUT": str(folder)}
    command = [*mpiexec(folder, network, environ), sys.executable, str(SCRIPT), arguments]
    done = patience.run(network.on_own_host(0, command), environ=os.environ | environ, timeout_s=_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)


def measure(experiment: Experiment, options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Add rounds to the results, and keep them after each."""
    settings: Settings = results["settings"]
    with links(max(variant.ranks for variant in options.only), "1gbit") as network:
        for round_ in range(options.rounds):
            for model in options.models:
                for rate in options.rates:
                    speed, _, delay = rate.partition(" ")
                    network.set_rate(speed)
                    network.set_delay(float(delay.removesuffix("ms") or 0) / 1e3)
                    found = settings.setdefault(f"{model}, {rate}", {})
                    for variant in random.sample(options.only, len(options.only)):
                        found.setdefault(variant.title, []).append(
                            launch(experiment, variant, model, network, options.steps)
                        )
            keep(results, options.json)
            print(f"round {round_ + 1} of {options.rounds}", file=sys.stderr, flush=True)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--models", help="default: the experiment's")
    parser.add_argument(
        "--rates", help="of the links, as tc writes them, with a delay: '1gbit 5ms'; default: the experiment's"
    )
    parser.add_argument("--only", help="titles of variants, separated by semicolons; default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="of each launch, after the warm-up")
    parser.add_argument("--json", type=Path, help="file for the results, continued from an earlier run")
    parser.add_argument("--anew", action="store_true", help="discard the results in the file")
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    experiment = EXPERIMENTS[options.experiment]
    if options.smoke:
        options.models, options.rounds, options.steps = experiment.smallest, 2, 2
        options.rates = experiment.rates[0].replace("1gbit", "10gbit")
    options.models = options.models.split(",") if options.models else experiment.models
    options.rates = options.rates.split(",") if options.rates else experiment.rates
    titles = options.only.split(";") if options.only else [variant.title for variant in experiment.variants]
    options.only = [experiment.variant(title) for title in titles]
    fresh = facts(*_MEASURED) | {"experiment": options.experiment, "settings": {}}
    results = resumed(options.json, fresh, anew=options.anew)
    try:
        measure(experiment, options, results)
    except LinkError as error:
        sys.exit(f"benchmarks.paper: {error}")
    print(table(results) + "\n" + rows_of(CLAIMS_HEAD, claims(results)))
    tables = {"scaling": scaling.predictions, "compression": half_bytes.table}
    if (predicted := tables.get(options.experiment)) is not None:
        print(predicted(results))


if __name__ == "__main__":
    main()
