"""Compare the step time of ours with telemetry, ours without, and torch's DDP, in trainings that take turns.

    python -m benchmarks.overhead [--models tiny,bert] [--ranks 2] [--sets claims,scale] [--device cuda] [--minutes 2]
        [--json FILE]

Each variant is a separate training, with `zero_grad()` as users call it, one thread a rank, and rank r on core r. The
machine itself gets faster and slower by a tenth from one second to the next. Turns are therefore short, 50 ms or a
step. A round is a new random order and the same order backwards, so that a drift affects all variants alike. Between
its turns a variant is stopped, background threads included. For short steps, each turn begins with a step that is not
measured and fills the caches. After some seconds all variants start anew; intervals are made of the launches' ratios
(`pairs.py`).

Large tensors are on huge pages, unless the environment has THP_MEM_ALLOC_ENABLE=0 (torch's switch). On small pages the
physical pages of a process are random, and decide its cache conflicts for as long as it lives: two trainings of the
same code, of a wide MLP, were up to 18 % apart, and 6 % from launch to launch as a rule (standard deviation). On huge
pages it is 2 %.

It runs for the given minutes in any case: stopping at a welcome result would bias the measurement. With
`--json` it continues from the results in the file, setting by setting, and an interrupted run loses its last launch
only. Results of other code or of another machine are refused.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.models import MODELS
from benchmarks.source import facts, keep, resumed
from benchmarks.tables import compare, tables
from benchmarks.teams import Team, machine_s, steps_of
from benchmarks.variants import SETS, VARIANTS, MissingError, Turn

SMALL = {"tiny", "wide", "transformer"}
MEASURED = ("ddpobs", "benchmarks/models.py", "benchmarks/variants.py", "benchmarks/teams.py", "benchmarks/overhead.py")
"""Code that must be the same for launches to be combined."""

Setting = dict[str, Any]
"""One model, number of ranks and set of variants, with its `launches`: seconds a step by variant."""


def settings(options: argparse.Namespace) -> dict[str, Setting]:
    """Return the settings that the options select. Large models run on 4 ranks only if `--ranks` is given."""
    selected: dict[str, Setting] = {}
    for name in options.sets.split(","):
        for ranks in map(int, (options.ranks or "2,4").split(",")):
            for model in options.models.split(","):
                if ranks <= 2 or model in SMALL or options.ranks:
                    key = f"{model}, {ranks} ranks, {name}"
                    selected[key] = {"model": model, "ranks": ranks, "set": name, "launches": []}
    return selected


def measure(setting: Setting, options: argparse.Namespace, keep: Callable[[], None]) -> None:
    """Add launches until the time is over."""
    ends = time.monotonic() + 60 * options.minutes
    while time.monotonic() < ends:
        setting["launches"].append(launch(setting, ends, options))
        keep()


def launch(setting: Setting, ends: float, options: argparse.Namespace) -> dict[str, Any]:
    """Start every variant's ranks, run at least two rounds of turns, and end them."""
    order = random.Random(len(setting["launches"]))
    names = SETS[setting["set"]]
    _check_memory(setting, len(names))
    teams: dict[str, Team] = {}
    missing: dict[str, str] = {}
    began = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="ddpobs-benchmark-")))
        for name in order.sample(names, len(names)):
            try:
                phase = 0.0 if options.smoke else order.random()
                teams[name] = _team(name, setting, folder / name, phase, options)
            except MissingError as reason:
                missing[name] = str(reason)
                continue
            stack.callback(teams[name].disband)
        count = steps_of(teams["torch"], options.turn_s)
        # After a long start the launch lasts longer too; otherwise most of the time would be starts.
        until = time.monotonic() + max(options.launch_s, 2 * (time.monotonic() - began))
        return _rounds(teams, count, min(ends, until), order) | {"missing": missing}


def _team(name: str, setting: Setting, folder: Path, phase: float, options: argparse.Namespace) -> Team:
    folder.mkdir()
    variant = VARIANTS[name]
    variants, ranks, device = len(SETS[setting["set"]]), setting["ranks"], options.device
    turn = Turn(MODELS[setting["model"]], variants, ranks, folder, phase=phase, device=device)
    return Team(ranks, lambda: variant.prepare(turn), variant.serve(turn), not options.no_pin, device)


def _rounds(teams: dict[str, Team], count: int, until: float, order: random.Random) -> dict[str, Any]:
    """Run rounds until `until`, at least two. Each variant has a turn in each half of a round."""
    warm = 1 if count > 2 else 0
    seconds: dict[str, list[float]] = {name: [] for name in teams}
    processor: dict[str, list[float]] = {name: [] for name in teams}
    began, (busy, stolen) = time.monotonic(), machine_s()
    while time.monotonic() < until or len(seconds["torch"]) < 4:
        names = order.sample(list(teams), len(teams))
        for name in (*names, *reversed(names)):
            wall_s, processor_s = teams[name].run(count, warm)
            seconds[name].append(round(wall_s, 7))
            processor[name].append(round(processor_s, 7))
    elapsed_s, (busy_now, stolen_now) = time.monotonic() - began, machine_s()
    ranks_s = sum(map(sum, processor.values())) * (count + warm) * teams["torch"].ranks
    return {
        "steps_a_turn": count,
        "seconds": seconds,
        "processor_s": processor,
        "others_cores": (busy_now - busy - ranks_s) / elapsed_s,
        "stolen_cores": (stolen_now - stolen) / elapsed_s,
    }


def _check_memory(setting: Setting, variants: int) -> None:
    """Exit rather than swap. Parameters, gradients, buckets and a retained gradient are four copies on each rank."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    needed = int(variants * setting["ranks"] * (4 * MODELS[setting["model"]].size_bytes() + 3e8))
    if free < needed:
        raise SystemExit(f"{variants} variants need {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free")


def main() -> None:
    """Measure setting by setting, and print Markdown tables of all results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    parser.add_argument("--ranks", help="default: 2, and 4 for the small models")
    parser.add_argument("--sets", default="claims", help=f"of {', '.join(SETS)}; default: %(default)s")
    parser.add_argument("--minutes", type=float, default=2.0, help="minutes for each setting; default: %(default)s")
    parser.add_argument("--turn-s", type=float, default=0.05, help="seconds of a turn; default: %(default)s")
    parser.add_argument(
        "--launch-s", type=float, default=15, help="seconds until new processes start; default: %(default)s"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the models train; default: %(default)s"
    )
    parser.add_argument("--no-pin", action="store_true", help="let ranks move between cores")
    parser.add_argument("--json", type=Path, help="file for the results, continued from an earlier run")
    parser.add_argument("--anew", action="store_true", help="discard the results in the file")
    parser.add_argument("--table", action="store_true", help="measure nothing, print the results in the file")
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    if options.smoke:
        options.models, options.ranks, options.sets, options.minutes, options.launch_s = (
            "tiny",
            "2",
            "claims,scale",
            0.01,
            0.1,
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    torch.set_num_threads(1)
    if options.table:
        results = json.loads(options.json.read_text())
    else:
        fresh = facts(*MEASURED, device=options.device) | {"settings": {}}
        results = resumed(options.json, fresh, anew=options.anew)
    for key, setting in {} if options.table else settings(options).items():
        result = results["settings"].setdefault(key, setting)
        measure(result, options, lambda: keep(results, options.json))
        noise = compare(result, "again", "torch")
        print(f"{key}: {len(result['launches'])} launches, torch over itself {noise or 'not measured'}", flush=True)
    print("\n" + tables(results["settings"]))


if __name__ == "__main__":
    main()
