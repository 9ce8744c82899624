"""Measure the effect of a broken collector on training: step time, processor time, memory, exit.

    python -m benchmarks.harm [--models tiny,transformer] [--faults drips,fails] [--launches 6] [--json FILE]

Two gloo ranks train, with telemetry and without in turns of the same processes, as in `benchmarks.switched`. There is
one launch with a healthy collector on the same cores and one with each broken collector, then all of them again. A
collector is stopped while telemetry is off. One row takes all faults together: faults without an effect are equal, and
together have many turns.

A launch ends like a script that reached its last line; the time until its processes are gone is its exit. A rank's
growth is its memory at the end of a launch less that in the middle.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.broken import FAULTS
from benchmarks.models import MODELS
from benchmarks.source import facts, keep, resumed
from benchmarks.switched import LIMIT, Launch, Training, compare, launch
from benchmarks.tables import rows_of
from benchmarks.teams import companion
from benchmarks.variants import VARIANTS, MissingError, Turn, Variant

RANKS = 2
HEALTHY, BROKEN = "a healthy collector", "all broken ones together"
MEASURED = (
    "ddpobs",
    *(f"benchmarks/{name}.py" for name in ("models", "variants", "teams", "broken", "switched", "harm")),
)


def _serve(fault: str, turn: Turn) -> list[subprocess.Popen[bytes]]:
    log = turn.folder / "broken.log"
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    process = companion([sys.executable, "-m", "benchmarks.broken", fault], log, PYTHONPATH=path)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if (text := log.read_text()).endswith("\n"):
            turn.collector = text.split()[-1]
            return [process]
        time.sleep(0.05)
    raise MissingError(f"no {fault} collector: {log.read_text()}")


def variant(name: str) -> Variant:
    """Return the training with a healthy collector, or with this fault."""
    if name in FAULTS:
        return Variant(FAULTS[name][0], VARIANTS["on"].wrap, serve=partial(_serve, name))
    return VARIANTS[name]


def table(launches: dict[str, list[Launch]]) -> str:
    """Return a Markdown table: a row for each collector, and one for the broken ones together."""
    head = [
        "collector",
        f"step time / off, at most {LIMIT}",
        "off once more (the noise)",
        "processor time / off",
        "telemetry, µs a step",
        "growth, MB",
        "waiting, MB",
        "exit, s",
    ]
    broken = [launch for name, group in launches.items() if name in FAULTS for launch in group]
    rows = []
    for title, group in [
        (HEALTHY, launches.get("collector", [])),
        (BROKEN, broken),
        *((title, launches.get(name, [])) for name, (title, _) in FAULTS.items()),
    ]:
        if not group:
            continue
        with_telemetry = compare(group, "on")
        rows.append(
            [
                title,
                f"{with_telemetry} {with_telemetry.verdict(LIMIT)}",
                str(compare(group, "again")),
                str(compare(group, "on", "processor_s")),
                f"{1e6 * sum(launch['telemetry_s'] for launch in group) / len(group):.0f}",
                f"{max(launch['growth_bytes'] for launch in group) / 1e6:.1f}",
                f"{max(launch['waiting_bytes'] for launch in group) / 1e6:.2f}",
                f"{max(launch['exit_s'] for launch in group):.2f}",
            ]
        )
    return rows_of(head, rows)


def _next(launches: dict[str, list[Launch]], names: Sequence[str]) -> str:
    """Return the name with the fewest launches, so that a drift affects all alike."""
    return min(names, key=lambda name: len(launches.setdefault(name, [])))


def main() -> None:
    """Run the launches, and print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny,transformer", help=f"of {', '.join(MODELS)}; default: %(default)s")
    parser.add_argument("--faults", default=",".join(FAULTS), help="default: %(default)s")
    parser.add_argument("--launches", type=int, default=3, help="with each collector; default: %(default)s")
    parser.add_argument("--launch-s", type=float, default=20.0, help="seconds of a launch; default: %(default)s")
    parser.add_argument("--turn-s", type=float, default=0.2, help="seconds of a turn; default: %(default)s")
    parser.add_argument("--json", type=Path, help="continue from the launches in this file")
    parser.add_argument("--anew", action="store_true", help="discard the results in the file")
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    if options.smoke:
        options.models, options.faults, options.launches, options.launch_s = "tiny", "silent,fails", 1, 0.1
        options.turn_s = 0.01
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    torch.set_num_threads(1)
    faults, models = options.faults.split(","), options.models.split(",")
    for option, selected, allowed in (("faults", faults, FAULTS), ("models", models, MODELS)):
        if unknown := sorted(set(selected) - set(allowed)):
            parser.error(f"--{option}: expected some of {', '.join(allowed)}, got {', '.join(unknown)}")
    results = resumed(options.json, facts(*MEASURED) | {"models": {}}, anew=options.anew)
    for model in models:
        launches: dict[str, list[Launch]] = results["models"].setdefault(model, {})
        names = ["collector", *faults]
        while len(launches[name := _next(launches, names)]) < options.launches:
            launches[name].append(launch(Training(MODELS[model], variant(name)), RANKS, options))
            keep(results, options.json)
        print(f"\n{MODELS[model].title}:\n\n{table(launches)}", flush=True)


if __name__ == "__main__":
    main()
