"""Measure the cost of telemetry: a step with it over a step without, in the same processes.

    python -m benchmarks.switched [--models tiny,sharded] [--ranks 2] [--minutes 4] [--launch-s 45] [--json FILE]

`overhead` compares separate trainings, of which one can be 2 % faster for as long as it lives, only by its memory
addresses. Here each rank has one training. Its telemetry (hooks, recorder and threads) is removed and restored in
turns. Model, buckets, process group and every address stay. "Off" and "off once more" are the same, so their ratio is
the noise.

As in `overhead`, turns are short, in a new random order and then backwards. Each begins with a step that is not
measured, because the interpreter may have to specialise its code again. The timers of telemetry run only while steps
with it are measured. Every launch is a new set of processes; intervals are made of launches.

The processor time of a step is that of the training thread and of telemetry's threads. The threads work by timers, so
their time is also given for a second of training. Their start, with the first batches and frequent first looks at the
code, is a cost of its own: what their time until the measurement exceeds that rate by.

It runs until the minutes are over: stopping at a welcome interval would bias the result.
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
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks import sharded
from benchmarks.models import MODELS, Model
from benchmarks.pairs import Ratio, ratio
from benchmarks.source import facts, keep, resumed
from benchmarks.tables import rows_of
from benchmarks.teams import Team, machine_s
from benchmarks.variants import VARIANTS, Turn, Variant
from ddpobs import telemetry
from ddpobs.export import delivery, schedule

KINDS = ["off", "again", "on"]
LIMIT = 1.01
MEASURED = ("ddpobs", *(f"benchmarks/{name}.py" for name in ("models", "variants", "teams", "sharded", "switched")))
_TIMED = {"seconds": 0, "processor_s": 1}
_MIN_STEPS = 4
"""Steps of a turn. Telemetry's threads also process the step before them, which is not measured."""
_DELIVERY_MS = 5

Launch = dict[str, Any]
"""Result of `launch`."""


class Switch:
    """Removes and restores what records a module of ours."""

    def __init__(self, wrapped: Any) -> None:
        core, self._recorder = wrapped.reducer.core, wrapped._recorder
        self._owners = [
            (wrapped, "_recorder"),
            (core, "recorder"),
            (core.used_map, "recorder"),
            (core.unused, "recorder"),
        ]

    def off(self) -> None:
        """Remove it."""
        self._put(None)

    def on(self) -> None:
        """Restore it."""
        self._put(self._recorder)

    def _put(self, recorder: Any) -> None:
        for owner, name in self._owners:
            setattr(owner, name, recorder)


@dataclass(frozen=True)
class Training:
    """A model, its variant with telemetry on, and the switch for what records it."""

    model: Model
    variant: Variant
    switch: type[Switch | sharded.Switch] = Switch


TRAININGS = {name: Training(model, VARIANTS["on"]) for name, model in MODELS.items()} | {
    "sharded": Training(sharded.UNITS_OF_10_MB, sharded.ATTACHED, sharded.Switch)
}


class StoppableClock:
    """A clock that can be stopped, in place of the module `time`."""

    def __init__(self) -> None:
        self._late_s = 0.0
        self._stopped_at_s: float | None = None

    def stop(self) -> None:
        """Stop it."""
        self._stopped_at_s = time.monotonic()

    def go_on(self) -> None:
        """Let it go on."""
        if self._stopped_at_s is not None:
            self._late_s += time.monotonic() - self._stopped_at_s
            self._stopped_at_s = None

    def monotonic(self) -> float:
        """Return the monotonic clock, without the time for which this one was stopped."""
        return self._without(time.monotonic())

    def time(self) -> float:
        """Return the wall clock, without that time."""
        return self._without(time.time())

    def _without(self, now_s: float) -> float:
        stopped_s = 0.0 if self._stopped_at_s is None else time.monotonic() - self._stopped_at_s
        return now_s - self._late_s - stopped_s


class Switched:
    """A training on this rank, with a switch for its telemetry.

    Args:
        switch: Removes and restores what records the module.
        step: One step of its training.
        companions: Process groups that exist for telemetry alone, such as its collector's: rank 0 stops them too.
    """

    def __init__(
        self, switch: Switch | sharded.Switch, step: Callable[[], None], companions: Sequence[int] = ()
    ) -> None:
        process = telemetry._process
        assert process is not None
        self._switch, self._step, self._process = switch, step, process
        self._companions = companions if dist.get_rank() == 0 else ()
        self._clock = StoppableClock()
        self._began_s = time.monotonic()

    def __call__(self, count: int) -> None:
        """Train `count` steps."""
        for _ in range(count):
            self._step()

    def rounds(self, turn_s: float, launch_s: float) -> dict[str, Any]:
        """Take turns of `turn_s` for `launch_s`, at least two rounds.

        Returns:
            (seconds, processor seconds) a step by kind and turn. And of the process: processor seconds of telemetry's
            threads at the start and a step, seconds of that start, growth in bytes over the second half, the most bytes
            of waiting batches.
        """
        began, resident, waiting = time.monotonic(), [], []
        start = {"start_s": _threads_s(), "start_wall_s": began - self._began_s}
        self(2)
        count = self._agreed(max(_MIN_STEPS, round(2 * turn_s / (time.monotonic() - began))))
        order = random.Random(self._agreed(int.from_bytes(os.urandom(4), "little")))
        turns: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        self._pause_threads()
        with patch.object(schedule, "time", self._clock), patch.object(delivery, "time", self._clock):
            threads_began_s = _threads_s()
            while len(turns["on"]) < 4 or self._agreed(time.monotonic() < began + launch_s):
                kinds = order.sample(KINDS, len(KINDS))
                for kind in (*kinds, *reversed(kinds)):
                    turns[kind].append(self._steps_on(count) if kind == "on" else self._steps_off(count))
                resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
                waiting.append(sum(self._process._exporter.queued_sizes))
            threads_s = _threads_s() - threads_began_s
        self._resume_threads()
        return {
            **turns,
            **start,
            "telemetry_s": threads_s / (len(turns["on"]) * count),
            "growth_bytes": resident[-1] - resident[len(resident) // 2],
            "waiting_bytes": max(waiting),
        }

    def _steps_on(self, count: int) -> tuple[float, float]:
        """Time steps with telemetry. Its threads run only while the clock runs."""
        for group in self._companions:
            os.killpg(group, signal.SIGCONT)
        self._step()
        dist.barrier()
        began, processor_began = time.perf_counter(), _processor_s()
        self._resume_threads()
        self(count)
        self._pause_threads()
        result = (time.perf_counter() - began) / count, (_processor_s() - processor_began) / count
        for _ in range(_DELIVERY_MS):  # Let a request end before the other's turn. A hanging one costs nothing.
            if self._process._exporter._delivery._in_flight is not None:
                time.sleep(0.001)
        for group in self._companions:
            os.killpg(group, signal.SIGSTOP)
        return result

    def _steps_off(self, count: int) -> tuple[float, float]:
        """Time steps without hooks and recorder, while the threads wait."""
        exporter, journal = self._process._exporter, self._process._journal
        recorded = exporter.emitted, len(journal.entries._queue)
        self._process._observation.remove_hooks()
        self._process._observation._counters.remove()
        self._switch.off()
        self._step()
        dist.barrier()
        began, processor_began = time.perf_counter(), _processor_s()
        self(count)
        result = (time.perf_counter() - began) / count, (_processor_s() - processor_began) / count
        self._switch.on()
        ending = self._process._ending
        self._process._observation.install_hooks(ending.fail, ending.end_cell, self._process._leave)
        if (exporter.emitted, len(journal.entries._queue)) != recorded:
            raise RuntimeError("something was recorded while telemetry was off")
        return result

    def _pause_threads(self) -> None:
        """Make telemetry's threads wait, after their current work."""
        self._process._exporter._work_lock.acquire()
        self._process._exporter._delivery._condition.acquire()
        self._clock.stop()

    def _resume_threads(self) -> None:
        self._clock.go_on()
        self._process._exporter._delivery._condition.release()
        self._process._exporter._work_lock.release()

    @staticmethod
    def _agreed(value: int) -> int:
        """Return rank 0's value."""
        tensor = torch.tensor(value)
        dist.broadcast(tensor, 0)
        return int(tensor)


def _threads_s() -> float:
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("ddpobs-") and thread.ident]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) for thread in threads)


def _processor_s() -> float:
    return time.thread_time() + _threads_s()


def launch(training: Training, ranks: int, options: argparse.Namespace) -> Launch:
    """Run turns in new processes, then end them like a script that reached its last line.

    Returns:
        `seconds` and `processor_s` a step by kind and turn, the mean over the ranks; the figures of a process, the
        worst over the ranks; `exit_s`; the cores that the hypervisor withheld.

    Raises:
        MissingError: A requirement of the variant is not installed.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="ddpobs-benchmark-")))
        turn = Turn(training.model, 1, ranks, folder, by_steps=False)
        processes = training.variant.serve(turn)
        companions = [process.pid for process in processes]
        switched = replace(
            training.variant, loop=lambda wrapped, step, _: Switched(training.switch(wrapped), step, companions)
        )

        def prepare() -> Callable[[int], Any]:
            steps: Any = switched.prepare(turn)
            return lambda _: steps.rounds(options.turn_s, options.launch_s)

        team = Team(ranks, prepare, processes)
        stack.callback(team.disband)
        began, (_, stolen) = time.monotonic(), machine_s()
        team.run(1)
        stolen_cores = (machine_s()[1] - stolen) / (time.monotonic() - began)
        notes = team.notes
        return {
            figure: {
                kind: [round(sum(pair[index] for pair in turns) / ranks, 7) for turns in zip(*by_rank, strict=True)]
                for kind, by_rank in ((kind, [note[kind] for note in notes]) for kind in KINDS)
            }
            for figure, index in _TIMED.items()
        } | {
            **{
                figure: max(note[figure] for note in notes)
                for figure in ("start_s", "start_wall_s", "telemetry_s", "growth_bytes", "waiting_bytes")
            },
            "exit_s": team.end(),
            "stolen_cores": stolen_cores,
        }


def compare(launches: list[Launch], kind: str, figure: str = "seconds", *, medians: bool = False) -> Ratio:
    """Return `on` over the mean of `off` and `again`, or `again` over `off`. `medians` as in `pairs.ratio`."""
    times = [launch[figure] for launch in launches]
    if kind == "again":
        return ratio([launch["again"] for launch in times], [launch["off"] for launch in times], medians=medians)
    without_telemetry = [
        [sum(pair) / 2 for pair in zip(launch["off"], launch["again"], strict=True)] for launch in times
    ]
    return ratio([launch["on"] for launch in times], without_telemetry, medians=medians)


def threads_ms(launches: list[Launch]) -> tuple[str, str]:
    """Return the processor time of telemetry's threads in ms, in a second of training and more at the start."""
    rates, starts_s = [], []
    for launch in launches:
        on_s = launch["seconds"]["on"]
        rates.append(launch["telemetry_s"] / (sum(on_s) / len(on_s)))
        if "start_s" in launch:  # Results from before 30 November have none.
            starts_s.append(launch["start_s"] - rates[-1] * launch["start_wall_s"])
    return f"{1e3 * sum(rates) / len(rates):.1f}", f"{1e3 * sum(starts_s) / len(starts_s):.0f}" if starts_s else "-"


def table(results: dict[str, list[Launch]]) -> str:
    """Return a Markdown table with a row for each model and number of ranks."""
    head = [
        "",
        "off, ms",
        "off once more (the noise)",
        "telemetry on",
        "by medians of the rounds",
        "its processor time",
        "its threads, ms a second",
        "its threads at the start, ms",
        "launches",
        "at most 1.01",
    ]
    rows = []
    for key, launches in results.items():
        off = [turn for launch in launches for turn in launch["seconds"]["off"]]
        with_telemetry, medians = compare(launches, "on"), compare(launches, "on", medians=True)
        row = [
            key,
            f"{1e3 * sum(off) / len(off):.1f}",
            str(compare(launches, "again")),
            str(with_telemetry),
            str(medians),
        ]
        row += [str(compare(launches, "on", "processor_s")), *threads_ms(launches), str(len(launches))]
        rows.append([*row, f"{with_telemetry.verdict(LIMIT)}; by medians {medians.verdict(LIMIT)}"])
    return rows_of(head, rows)


def main() -> None:
    """Measure model by model, and print a Markdown table of all results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(TRAININGS), help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=4.0, help="minutes for each model; default: %(default)s")
    parser.add_argument("--turn-s", type=float, default=0.1, help="seconds of a turn; default: %(default)s")
    parser.add_argument(
        "--launch-s", type=float, default=45, help="seconds until new processes start; default: %(default)s"
    )
    parser.add_argument("--json", type=Path, help="file for the results, continued from an earlier run")
    parser.add_argument("--anew", action="store_true", help="discard the results in the file")
    parser.add_argument("--table", action="store_true", help="measure nothing, print the results in the file")
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    if options.smoke:
        options.models, options.minutes, options.launch_s, options.turn_s = "tiny,sharded", 0.01, 0.1, 0.01
    torch.set_num_threads(1)
    if options.table:
        results = json.loads(options.json.read_text())
    else:
        results = resumed(options.json, facts(*MEASURED) | {"found": {}}, anew=options.anew)
    for name in [] if options.table else options.models.split(","):
        training = TRAININGS[name]
        launches = results["found"].setdefault(f"{training.model.title}, {options.ranks} ranks", [])
        ends = time.monotonic() + 60 * options.minutes
        while time.monotonic() < ends:
            launches.append(launch(training, options.ranks, options))
            keep(results, options.json)
    print(table(results["found"]))


if __name__ == "__main__":
    main()
