"""What telemetry does to training while its collector is broken: step time, processor time, memory, exit.

    python -m benchmarks.harm [--faults drips,fails] [--model tiny] [--minutes 2] [--json FILE]

Two gloo ranks train, in turns: without telemetry, without once more (the noise), with a healthy collector, and with
broken ones, a few in each launch. Ratios are to training without telemetry, paired by round. At a launch's end every
team ends as a script does that reached its last line, and the time until its processes are gone is its exit. The first
half of a launch fills memory; what a rank holds more at its end than in the middle is its growth.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.broken import FAULTS
from benchmarks.models import MODELS
from benchmarks.tables import compare, rows_of
from benchmarks.teams import Steps, Team, companion
from benchmarks.variants import VARIANTS, MissingError, Turn, Variant
from ddpobs import telemetry

RANKS = 2
LIMIT = 1.01
PLAIN = {"off": "telemetry off", "again": "off once more (the noise)", "collector": "a healthy collector"}

Launch = dict[str, Any]
"""By variant: seconds and processor seconds a step by round, what its ranks hold, seconds of its exit."""


def _loop(_: torch.nn.Module, step: Callable[[], None], __: Turn) -> Steps:
    def steps(count: int) -> dict[str, float]:
        for _ in range(count):
            step()
        return holds()

    return steps


def holds() -> dict[str, float]:
    """Of this rank: processor seconds of telemetry's threads, resident bytes, bytes of batches that wait in memory."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("ddpobs-") and thread.ident]
    process = telemetry._process
    return {
        "telemetry_s": sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) for thread in threads),
        "resident_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "waiting_bytes": sum(process._exporter.held) if process else 0,
    }


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
    """The training that goes by that name: plain, or with the collector broken in this way."""
    if name in FAULTS:
        return Variant(FAULTS[name][0], VARIANTS["on"].wrap, _loop, partial(_serve, name))
    return replace(VARIANTS["off" if name == "again" else name], loop=_loop)


def launch(names: Sequence[str], options: argparse.Namespace, order: random.Random) -> Launch:
    """Start all teams, have them take turns for a while, and let them end one by one."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="ddpobs-benchmark-")))
        made: dict[str, Team] = {}
        for name in names:
            (folder / name).mkdir()
            turn = Turn(MODELS[options.model], len(names), RANKS, folder / name)
            one = variant(name)
            made[name] = Team(RANKS, partial(one.prepare, turn), one.serve(turn))
            stack.callback(made[name].disband)
        for team in made.values():
            team.run(2)
        count = max(2, round(options.turn_s / made["off"].run(2)[0]))
        seconds: dict[str, list[float]] = {name: [] for name in names}
        processor: dict[str, list[float]] = {name: [] for name in names}
        notes: dict[str, list[list[dict[str, float]]]] = {name: [] for name in names}
        until = time.monotonic() + 60 * options.minutes
        while time.monotonic() < until or len(seconds["off"]) < 2:
            for name in order.sample(names, len(names)):
                wall_s, used_s = made[name].run(count)
                seconds[name].append(wall_s)
                processor[name].append(used_s)
                notes[name].append(made[name].notes)
        return {
            "seconds": seconds,
            "processor_s": processor,
            "holds": {name: _summary(notes[name], count) for name in names},
            "exit_s": {name: made[name].end() for name in names},
        }


def _summary(notes: Sequence[Sequence[dict[str, float]]], count: int) -> dict[str, float]:
    """Of the rank that is worst off: processor time a step, growth over the second half, the most that waited."""

    def grown(rank: int, what: str, since: int) -> float:
        return notes[-1][rank][what] - notes[since][rank][what]

    ranks, steps = range(RANKS), count * (len(notes) - 1)
    return {
        "telemetry_s": max(grown(rank, "telemetry_s", 0) for rank in ranks) / steps,
        "growth_bytes": max(grown(rank, "resident_bytes", len(notes) // 2) for rank in ranks),
        "waiting_bytes": max(note["waiting_bytes"] for turn in notes for note in turn),
    }


def table(launches: Sequence[Launch]) -> str:
    """Markdown: a row for each variant, of all launches that had it."""
    head = [
        "collector",
        f"step time / off, at most {LIMIT}",
        "processor time / off",
        "telemetry, µs a step",
        "growth, MB",
        "waiting, MB",
        "exit, s",
    ]
    rows = []
    for name in [*PLAIN, *FAULTS]:
        found, used = (compare({"launches": launches}, name, "off", what) for what in ("seconds", "processor_s"))
        if found is None:
            continue
        held = [one["holds"][name] for one in launches if name in one["holds"]]
        rows.append(
            [
                PLAIN.get(name) or FAULTS[name][0],
                "" if name == "off" else f"{found} {found.verdict(LIMIT)}",
                "" if name == "off" else str(used),
                f"{1e6 * max(one['telemetry_s'] for one in held):.0f}",
                f"{max(one['growth_bytes'] for one in held) / 1e6:.1f}",
                f"{max(one['waiting_bytes'] for one in held) / 1e6:.2f}",
                f"{max(one['exit_s'][name] for one in launches if name in one['exit_s']):.2f}",
            ]
        )
    return rows_of(head, rows)


def main() -> None:
    """Launch after launch, then print the table of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", default=",".join(FAULTS), help="default: %(default)s")
    parser.add_argument("--model", default="tiny", choices=MODELS, help="default: %(default)s")
    parser.add_argument("--launches", type=int, default=3, help="for each fault; default: %(default)s")
    parser.add_argument("--minutes", type=float, default=2.0, help="of each launch; default: %(default)s")
    parser.add_argument("--turn-s", type=float, default=0.25, help="seconds of a turn; default: %(default)s")
    parser.add_argument("--together", type=int, default=4, help="faults in a launch; default: %(default)s")
    parser.add_argument("--json", type=Path, help="add to the launches that this file holds")
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    if options.smoke:
        options.faults, options.launches, options.minutes, options.turn_s = "silent,fails", 1, 0.01, 0.05
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    torch.set_num_threads(1)
    faults = options.faults.split(",")
    if unknown := sorted(set(faults) - set(FAULTS)):
        parser.error(f"--faults: expected some of {', '.join(FAULTS)}, got {', '.join(unknown)}")
    launches: list[Launch] = []
    if options.json and options.json.exists():
        launches = json.loads(options.json.read_text())
    for number in range(options.launches):
        for start in range(0, len(faults), options.together):
            names = [*PLAIN, *faults[start : start + options.together]]
            launches.append(launch(names, options, random.Random(number)))
            if options.json:
                options.json.write_text(json.dumps(launches) + "\n")
    print(table(launches))


if __name__ == "__main__":
    main()
