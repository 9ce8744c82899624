"""Step time of ours with telemetry, ours without, and torch's DDP, on gloo ranks that take turns.

    python -m benchmarks.overhead [--models tiny,bert] [--ranks 2] [--sets claims,scale] [--minutes 2] [--json FILE]

Each variant is a training of its own, `zero_grad()` as users call it, one thread a rank, rank r on core r. The machine
itself gets faster and slower by a tenth from one second to the next, so that turns are short, 50 ms or a step, and a
round is an order drawn anew and the same order backwards: what drifts is in each variant alike. Whoever is not at turn
is stopped, background threads and all; short steps have one that is not measured at the beginning of a turn, to find
its data in the caches again. After some seconds all are started anew, and the launches' ratios are what intervals are
made of (`pairs.py`).

Large tensors are on huge pages, unless the environment has THP_MEM_ALLOC_ENABLE=0 (torch's switch). On small ones it is
chance which physical pages a process gets and what they push out of its caches, for as long as it lives: two trainings
of the same code, of a wide MLP, were up to 18 % apart, and 6 % from launch to launch as a rule (standard deviation); on
huge pages it is 2 %.

It goes on for the minutes given, whatever its intervals tell: to end when they tell what one would like to hear is no
measurement. With `--json` it goes on from what the file holds, setting by setting, and a run that was cut off loses its
last launch only; what other code or another machine left there is refused.
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
"""What has to be the same for launches to be taken together."""

Setting = dict[str, Any]
"""What is known of one model, number of ranks and set of variants: facts and `launches`, seconds a step by variant."""


def settings(options: argparse.Namespace) -> dict[str, Setting]:
    """The settings that the options ask for; 4 ranks only for the small models, unless one is named."""
    chosen: dict[str, Setting] = {}
    for name in options.sets.split(","):
        for ranks in map(int, (options.ranks or "2,4").split(",")):
            for model in options.models.split(","):
                if ranks <= 2 or model in SMALL or options.ranks:
                    key = f"{model}, {ranks} ranks, {name}"
                    chosen[key] = {"model": model, "ranks": ranks, "set": name, "launches": []}
    return chosen


def measure(setting: Setting, options: argparse.Namespace, keep: Callable[[], None]) -> None:
    """Add launches until the time is over."""
    ends = time.monotonic() + 60 * options.minutes
    while time.monotonic() < ends:
        setting["launches"].append(launch(setting, ends, options))
        keep()


def launch(setting: Setting, ends: float, options: argparse.Namespace) -> dict[str, Any]:
    """Start every variant's ranks, have them take turns for a while (two rounds at least), and end them."""
    order = random.Random(len(setting["launches"]))
    names = SETS[setting["set"]]
    _check_memory(setting, len(names))
    made: dict[str, Team] = {}
    missing: dict[str, str] = {}
    began = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="ddpobs-benchmark-")))
        for name in order.sample(names, len(names)):
            try:
                phase = 0.0 if options.smoke else order.random()
                made[name] = _team(name, setting, folder / name, phase, not options.no_pin)
            except MissingError as reason:
                missing[name] = str(reason)
                continue
            stack.callback(made[name].disband)
        count = steps_of(made["torch"], options.turn_s)
        # Where the start took long, so does what follows, or most of the time would be starts.
        until = time.monotonic() + max(options.launch_s, 2 * (time.monotonic() - began))
        return _rounds(made, count, min(ends, until), order) | {"missing": missing}


def _team(name: str, setting: Setting, folder: Path, phase: float, pin: bool) -> Team:
    folder.mkdir()
    variant = VARIANTS[name]
    turn = Turn(MODELS[setting["model"]], len(SETS[setting["set"]]), setting["ranks"], folder, phase=phase)
    return Team(setting["ranks"], lambda: variant.prepare(turn), variant.serve(turn), pin)


def _rounds(made: dict[str, Team], count: int, until: float, order: random.Random) -> dict[str, Any]:
    """Rounds until then, two at least: each variant has a turn in each half."""
    warm = 1 if count > 2 else 0
    seconds: dict[str, list[float]] = {name: [] for name in made}
    processor: dict[str, list[float]] = {name: [] for name in made}
    began, (busy, stolen) = time.monotonic(), machine_s()
    while time.monotonic() < until or len(seconds["torch"]) < 4:
        names = order.sample(list(made), len(made))
        for name in (*names, *reversed(names)):
            wall_s, processor_s = made[name].run(count, warm)
            seconds[name].append(round(wall_s, 7))
            processor[name].append(round(processor_s, 7))
    took, (busy_now, stolen_now) = time.monotonic() - began, machine_s()
    ranks_s = sum(map(sum, processor.values())) * (count + warm) * made["torch"].ranks
    return {
        "steps_a_turn": count,
        "seconds": seconds,
        "processor_s": processor,
        "others_cores": (busy_now - busy - ranks_s) / took,
        "stolen_cores": (stolen_now - stolen) / took,
    }


def _check_memory(setting: Setting, variants: int) -> None:
    """Say it rather than swap: parameters, gradients, buckets and a gradient kept make four copies on each rank."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    needed = int(variants * setting["ranks"] * (4 * MODELS[setting["model"]].size_bytes() + 3e8))
    if free < needed:
        raise SystemExit(f"{variants} variants need {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free")


def main() -> None:
    """Measure setting by setting, and print tables in Markdown of all that is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    parser.add_argument("--ranks", help="default: 2, and 4 for the small models")
    parser.add_argument("--sets", default="claims", help=f"of {', '.join(SETS)}; default: %(default)s")
    parser.add_argument("--minutes", type=float, default=2.0, help="for each setting; default: %(default)s")
    parser.add_argument("--turn-s", type=float, default=0.05, help="seconds of a turn; default: %(default)s")
    parser.add_argument("--launch-s", type=float, default=15, help="new processes after so long; default: %(default)s")
    parser.add_argument("--no-pin", action="store_true", help="let ranks move between cores")
    parser.add_argument("--json", type=Path, help="keep results here, and go on from them")
    parser.add_argument("--anew", action="store_true", help="forget what the file holds")
    parser.add_argument("--table", action="store_true", help="measure nothing, print what the file holds")
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
        results = resumed(options.json, facts(*MEASURED) | {"settings": {}}, anew=options.anew)
    for key, setting in {} if options.table else settings(options).items():
        known = results["settings"].setdefault(key, setting)
        measure(known, options, lambda: keep(results, options.json))
        noise = compare(known, "again", "torch")
        print(f"{key}: {len(known['launches'])} launches, torch over itself {noise or 'not asked'}", flush=True)
    print("\n" + tables(results["settings"]))


if __name__ == "__main__":
    main()
