"""What telemetry does to training while its collector is broken: step time, processor time, memory, exit.

    python -m benchmarks.harm [--models tiny,transformer] [--faults drips,fails] [--launches 6] [--json FILE]

Two gloo ranks train, in turns of 50 ms or a step as in `benchmarks.overhead`, all in one launch: without telemetry
(often, for all others are compared with it), without once more (the noise), with a healthy collector, and with each
broken one. A round is an order drawn anew and the same backwards. Ratios are to training without telemetry, and of what
is broken to what is healthy; beside each fault all of them are taken together, for faults that do no harm are one
thing, which many turns tell of.

After a model's last launch every team ends as a script does that reached its last line, one by one; the time until its
processes are gone is its exit. What a rank holds more at a launch's end than in the middle is its growth.
"""

from __future__ import annotations

import argparse
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
from benchmarks.source import facts, keep, resumed
from benchmarks.tables import compare, rows_of
from benchmarks.teams import Steps, Team, companion, steps_of
from benchmarks.variants import VARIANTS, MissingError, Turn, Variant
from ddpobs import telemetry

RANKS = 2
LIMIT = 1.01
PLAIN = {"off": "telemetry off", "again": "off once more (the noise)", "collector": "a healthy collector"}
BROKEN = "all broken ones together"
MEASURED = ("ddpobs", *(f"benchmarks/{name}.py" for name in ("models", "variants", "teams", "broken", "harm")))
_EVERY = 4
"""Turns of others between two of `off`."""

Launch = dict[str, Any]
"""By variant: seconds and processor seconds a step by half of a round, what its ranks hold, seconds of its exit."""


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


def launch(names: Sequence[str], model: str, options: argparse.Namespace, number: int) -> Launch:
    """Start all teams, and have them take turns for a while; after the last launch they end one by one."""
    order = random.Random(number)
    slots = len(_with_off(names[1:]))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="ddpobs-benchmark-")))
        made: dict[str, Team] = {}
        for name in order.sample(names, len(names)):
            (folder / name).mkdir()
            turn = Turn(MODELS[model], slots, RANKS, folder / name, phase=0.0 if options.smoke else order.random())
            one = variant(name)
            made[name] = Team(RANKS, partial(one.prepare, turn), one.serve(turn))
            stack.callback(made[name].disband)
        count = steps_of(made["off"], options.turn_s)
        warm = 1 if count > 2 else 0
        seconds: dict[str, list[float]] = {name: [] for name in names}
        processor: dict[str, list[float]] = {name: [] for name in names}
        notes: dict[str, list[list[dict[str, float]]]] = {name: [] for name in names}
        until = time.monotonic() + options.launch_s
        while time.monotonic() < until or len(seconds["off"]) < 2:
            turns = _with_off(order.sample(names[1:], len(names) - 1))
            for half in (turns, turns[::-1]):
                took: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
                for name in half:
                    took[name].append(made[name].run(count, warm))
                for name, found in took.items():
                    seconds[name].append(round(sum(wall_s for wall_s, _ in found) / len(found), 7))
                    processor[name].append(round(sum(used_s for _, used_s in found) / len(found), 7))
                    notes[name].append(made[name].notes)
        last = number == options.launches - 1
        return {
            "seconds": seconds,
            "processor_s": processor,
            "holds": {name: _summary(notes[name], (count + warm) * max(1, turns.count(name))) for name in names},
            "exit_s": {name: made[name].end() for name in names} if last else {},
        }


def _with_off(others: Sequence[str]) -> list[str]:
    """Turns of half a round: `off`, and again after every few others."""
    turns: list[str] = []
    for place, name in enumerate(others):
        turns += ["off", name] if place % _EVERY == 0 else [name]
    return turns


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
        "step time / healthy",
        "processor time / off",
        "telemetry, µs a step",
        "growth, MB",
        "waiting, MB",
        "exit, s",
    ]
    launches = [_pooled(one) for one in launches]
    rows = []
    for name in [*PLAIN, BROKEN, *FAULTS]:
        found, used, healthy = (
            compare({"launches": launches}, name, to, what)
            for to, what in (("off", "seconds"), ("off", "processor_s"), ("collector", "seconds"))
        )
        if found is None:
            continue
        held = [one["holds"][name] for one in launches if name in one["holds"]]
        exits = [one["exit_s"][name] for one in launches if name in one["exit_s"]]
        rows.append(
            [
                PLAIN.get(name) or (FAULTS[name][0] if name in FAULTS else name),
                "" if name == "off" else f"{found} {found.verdict(LIMIT)}",
                "" if name in PLAIN else str(healthy),
                "" if name == "off" else str(used),
                f"{1e6 * sum(one['telemetry_s'] for one in held) / len(held):.0f}",
                f"{max(one['growth_bytes'] for one in held) / 1e6:.1f}",
                f"{max(one['waiting_bytes'] for one in held) / 1e6:.2f}",
                f"{max(exits):.2f}" if exits else "",
            ]
        )
    return rows_of(head, rows)


def _pooled(launch: Launch) -> Launch:
    """With the mean over its faults, round by round, and the most that one of them holds."""
    faults = [name for name in launch["seconds"] if name in FAULTS]

    def mean(what: str) -> dict[str, list[float]]:
        columns = zip(*(launch[what][name] for name in faults), strict=True)
        return {**launch[what], BROKEN: [sum(column) / len(faults) for column in columns]}

    held = [launch["holds"][name] for name in faults]
    worst = {what: max(one[what] for one in held) for what in held[0]}
    worst["telemetry_s"] = sum(one["telemetry_s"] for one in held) / len(held)
    exits = {name: seconds for name, seconds in launch["exit_s"].items() if name in FAULTS}
    return {
        "seconds": mean("seconds"),
        "processor_s": mean("processor_s"),
        "holds": {**launch["holds"], BROKEN: worst},
        "exit_s": {**launch["exit_s"], **({BROKEN: max(exits.values())} if exits else {})},
    }


def main() -> None:
    """Launch after launch, then print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny,transformer", help=f"of {', '.join(MODELS)}; default: %(default)s")
    parser.add_argument("--faults", default=",".join(FAULTS), help="default: %(default)s")
    parser.add_argument("--launches", type=int, default=6, help="of each model; default: %(default)s")
    parser.add_argument("--launch-s", type=float, default=75.0, help="seconds of a launch; default: %(default)s")
    parser.add_argument("--turn-s", type=float, default=0.05, help="seconds of a turn; default: %(default)s")
    parser.add_argument("--json", type=Path, help="go on from the launches that this file holds")
    parser.add_argument("--anew", action="store_true", help="forget what the file holds")
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    if options.smoke:
        options.models, options.faults, options.launches, options.launch_s = "tiny", "silent,fails", 1, 0.1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    torch.set_num_threads(1)
    faults, models = options.faults.split(","), options.models.split(",")
    for option, given, known in (("faults", faults, FAULTS), ("models", models, MODELS)):
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"--{option}: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    results = resumed(options.json, facts(*MEASURED) | {"models": {}}, anew=options.anew)
    for model in models:
        launches = results["models"].setdefault(model, [])
        for number in range(len(launches), options.launches):
            launches.append(launch([*PLAIN, *faults], model, options, number))
            keep(results, options.json)
        print(f"\n{MODELS[model].title}, {len(launches)} launches:\n\n{table(launches)}", flush=True)


if __name__ == "__main__":
    main()
