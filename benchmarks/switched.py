"""What telemetry costs: a step with it over a step without, in the same processes.

    python -m benchmarks.switched [--models tiny,bert] [--ranks 2] [--minutes 4] [--json FILE]

`overhead` compares trainings of their own, of which one can be 2 % faster than the other for as long as it lives, only
by where its memory is. Here each rank has one training, whose telemetry is taken out and put back in turns: hooks,
recorder and threads. Model, buckets, process group and every address stay. "Off" and "off once more" are the same, and
so the noise. As in `overhead` turns are short, in an order drawn anew and then backwards, and begin with a step that is
not measured, as the interpreter may have to find out anew what it calls. Batches are cut after so many steps with
telemetry as train in the time of a flush, some before it begins; every launch is new processes, and what intervals are
made of.

It goes on until the minutes are over: a run that ends as soon as its interval tells favours what it tells.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.models import MODELS
from benchmarks.pairs import Ratio, ratio
from benchmarks.source import facts, keep, resumed
from benchmarks.tables import rows_of
from benchmarks.teams import Team, machine_s
from benchmarks.variants import VARIANTS, Turn, Variant
from ddpobs import telemetry

KINDS = ["off", "again", "on"]
LIMIT = 1.01
MEASURED = ("ddpobs", *(f"benchmarks/{name}.py" for name in ("models", "variants", "teams", "switched")))
_TIMED = {"seconds": 0, "processor_s": 1}
_DELIVERY_MS = 5

Launch = dict[str, Any]
"""What `launch` returns."""


class Switched:
    """A training on this rank, and the switch of its telemetry.

    Args:
        wrapped: Ours, with telemetry on.
        step: One step of its training.
        others: Process groups that are there for telemetry alone, such as its collector's: rank 0 stops them, too.
    """

    def __init__(self, wrapped: Any, step: Callable[[], None], others: Sequence[int] = ()) -> None:
        process = telemetry._process
        assert process is not None
        self._step, self._process, self._recorder = step, process, wrapped._recorder
        core = wrapped.reducer.core
        self._owners = [
            (wrapped, "_recorder"),
            (core, "recorder"),
            (core.used_map, "recorder"),
            (core.unused, "recorder"),
        ]
        self._hooks: list[Any] = [process._hooks, process._loaders, process._collectives]
        self._others = others if dist.get_rank() == 0 else ()

    def __call__(self, count: int) -> None:
        """Train so many steps."""
        for _ in range(count):
            self._step()

    def rounds(self, turn_s: float, launch_s: float) -> dict[str, Any]:
        """Take turns for so long, two rounds at least.

        Returns:
            By kind and turn (seconds, processor seconds) a step, and of the process: processor seconds of telemetry's
            threads a step, growth in bytes over the second half, the most bytes of batches that waited in memory.
        """
        began, began_s, resident, waiting = time.monotonic(), _threads_s(), [], []
        self(2)
        count = self._agreed(max(1, round(2 * turn_s / (time.monotonic() - began))))
        order = random.Random(self._agreed(int.from_bytes(os.urandom(4), "little")))
        took: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        self._hold()
        while len(took["on"]) < 4 or self._agreed(time.monotonic() < began + launch_s):
            kinds = order.sample(KINDS, len(KINDS))
            for kind in (*kinds, *reversed(kinds)):
                took[kind].append(self._on(count) if kind == "on" else self._off(count))
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
            waiting.append(sum(self._process._exporter.queued_sizes))
        self._let_go()
        return took | {
            "telemetry_s": (_threads_s() - began_s) / (len(took["on"]) * count),
            "growth_bytes": resident[-1] - resident[len(resident) // 2],
            "waiting_bytes": max(waiting),
        }

    def _on(self, count: int) -> tuple[float, float]:
        """Whatever telemetry's threads have to do is done between the clock's start and its end."""
        for other in self._others:
            os.killpg(other, signal.SIGCONT)
        self._step()
        dist.barrier()
        began, used = time.perf_counter(), time.process_time()
        self._let_go()
        self(count)
        self._hold()
        took = (time.perf_counter() - began) / count, (time.process_time() - used) / count
        for _ in range(_DELIVERY_MS):  # A request under way is not answered on the other's time; or it hangs, for free.
            if self._process._exporter._delivery._under_way is not None:
                time.sleep(0.001)
        for other in self._others:
            os.killpg(other, signal.SIGSTOP)
        return took

    def _off(self, count: int) -> tuple[float, float]:
        """Hooks and recorder are out, the threads wait."""
        exporter, journal = self._process._exporter, self._process._journal
        told = exporter.emitted, len(journal._entries)
        for hooks in self._hooks:
            hooks.remove()
        for owner, name in self._owners:
            setattr(owner, name, None)
        self._step()
        dist.barrier()
        began, used = time.perf_counter(), time.process_time()
        self(count)
        took = (time.perf_counter() - began) / count, (time.process_time() - used) / count
        for owner, name in self._owners:
            setattr(owner, name, self._recorder)
        for hooks in self._hooks:
            hooks.install()
        if (exporter.emitted, len(journal._entries)) != told:
            raise RuntimeError("something was recorded while telemetry was off")
        return took

    def _hold(self) -> None:
        """Have telemetry's threads wait, once they have done what they are at."""
        self._process._exporter._working.acquire()
        self._process._exporter._delivery._changed.acquire()

    def _let_go(self) -> None:
        self._process._exporter._delivery._changed.release()
        self._process._exporter._working.release()

    @staticmethod
    def _agreed(value: int) -> int:
        """Rank 0's."""
        told = torch.tensor(value)
        dist.broadcast(told, 0)
        return int(told)


def _threads_s() -> float:
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("ddpobs-") and thread.ident]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) for thread in threads)


def launch(model: str, variant: Variant, ranks: int, options: argparse.Namespace, number: int) -> Launch:
    """Turns of new processes, and the end of these as of a script that reached its last line.

    Returns:
        `seconds` and `processor_s` a step by kind and turn, the mean over the ranks; what is said of a process, of the
        rank that is worst off; `exit_s`; the cores that the hypervisor kept.

    Raises:
        MissingError: What the variant needs is not installed.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="ddpobs-benchmark-")))
        phase = 0.0 if options.smoke else random.Random(number).random()
        turn = Turn(MODELS[model], len(KINDS), ranks, folder, phase=phase)
        served = variant.serve(turn)
        others = [process.pid for process in served]
        switched = replace(variant, loop=lambda wrapped, step, _: Switched(wrapped, step, others))

        def prepare() -> Callable[[int], Any]:
            made: Any = switched.prepare(turn)
            return lambda _: made.rounds(options.turn_s, options.launch_s)

        team = Team(ranks, prepare, served)
        stack.callback(team.disband)
        began, (_, stolen) = time.monotonic(), machine_s()
        team.run(1)
        stolen_cores = (machine_s()[1] - stolen) / (time.monotonic() - began)
        notes = team.notes
        return {
            what: {
                kind: [round(sum(one[place] for one in turns) / ranks, 7) for turns in zip(*by_rank, strict=True)]
                for kind, by_rank in ((kind, [note[kind] for note in notes]) for kind in KINDS)
            }
            for what, place in _TIMED.items()
        } | {
            **{what: max(note[what] for note in notes) for what in ("telemetry_s", "growth_bytes", "waiting_bytes")},
            "exit_s": team.end(),
            "stolen_cores": stolen_cores,
        }


def compare(launches: list[Launch], of: str, what: str = "seconds", *, medians: bool = False) -> Ratio:
    """`on` over the mean of both that are off, or `again` over `off`; `medians` as in `pairs.ratio`."""
    both = [launch[what] for launch in launches]
    if of == "again":
        return ratio([one["again"] for one in both], [one["off"] for one in both], medians=medians)
    without = [[sum(pair) / 2 for pair in zip(one["off"], one["again"], strict=True)] for one in both]
    return ratio([one["on"] for one in both], without, medians=medians)


def table(found: dict[str, list[Launch]]) -> str:
    """A row each model and number of ranks."""
    head = [
        "",
        "off, ms",
        "off once more (the noise)",
        "telemetry on",
        "by medians of the rounds",
        "its processor time",
        "launches",
        "at most 1.01",
    ]
    rows = []
    for key, launches in found.items():
        off = [turn for one in launches for turn in one["seconds"]["off"]]
        on, medians = compare(launches, "on"), compare(launches, "on", medians=True)
        row = [key, f"{1e3 * sum(off) / len(off):.1f}", str(compare(launches, "again")), str(on), str(medians)]
        row += [str(compare(launches, "on", "processor_s")), str(len(launches))]
        rows.append([*row, f"{on.verdict(LIMIT)}; by medians {medians.verdict(LIMIT)}"])
    return rows_of(head, rows)


def main() -> None:
    """Measure model by model, and print a table in Markdown of all that is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=4.0, help="for each model; default: %(default)s")
    parser.add_argument("--turn-s", type=float, default=0.1, help="seconds of a turn; default: %(default)s")
    parser.add_argument("--launch-s", type=float, default=30, help="new processes after so long; default: %(default)s")
    parser.add_argument("--json", type=Path, help="keep results here, and go on from them")
    parser.add_argument("--anew", action="store_true", help="forget what the file holds")
    parser.add_argument("--table", action="store_true", help="measure nothing, print what the file holds")
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    if options.smoke:
        options.models, options.minutes, options.launch_s, options.turn_s = "tiny", 0.01, 0.1, 0.01
    torch.set_num_threads(1)
    if options.table:
        results = json.loads(options.json.read_text())
    else:
        results = resumed(options.json, facts(*MEASURED) | {"found": {}}, anew=options.anew)
    for model in [] if options.table else options.models.split(","):
        launches = results["found"].setdefault(f"{MODELS[model].title}, {options.ranks} ranks", [])
        ends = time.monotonic() + 60 * options.minutes
        while time.monotonic() < ends:
            launches.append(launch(model, VARIANTS["on"], options.ranks, options, len(launches)))
            keep(results, options.json)
    print(table(results["found"]))


if __name__ == "__main__":
    main()
