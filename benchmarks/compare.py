"""Measure how often a comparison of two runs is right: equal runs, and runs of which one phase is 5 % slower.

    python -m benchmarks.compare [--launches 4] [--steps 1200] [--times 200] [--keep FOLDER] [--json FILE] [--smoke]

Each launch is a real training of two gloo ranks, the same each time. Every pair of launches is compared as it is: the
differences are those of this machine at other moments.

Pairs of equal runs are also drawn from the recorded steps of one launch: blocks of 200 consecutive steps in random
order, so that a step depends on the steps before it as in the training. In half of the pairs one phase of the second
run is made 5 % longer. A second table has the same steps with their deviations from the mean scaled to 5 %: a machine
without other programs. With `--keep` the recorded database stays in the folder, and is used again.

    python -m benchmarks.compare --halves

compares the halves of the balanced runs in `benchmarks/diagnosis/runs.npz`: few steps, on a machine that was loaded.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from ddpobs_server.analysis.comparison.compare import WARM_UP, RunTimes, compare
from ddpobs_server.analysis.statistics.dependent_mean import dependent_mean
from ddpobs_server.analysis.steps.joined_steps import Floats
from ddpobs_server.reports.compare import Side, compare_json, read_times, run_times
from ddpobs_server.store import Store

from benchmarks.diagnosis.replay import RUNS, load
from benchmarks.rig.collector import collector
from benchmarks.rig.training import train
from ddpobs.wire import Ints

SLOWER, LIMIT, PHASE = 1.05, 0.03, "backward"
COUNTS = (100, 500, 1000, 2000, 4000)
_BLOCK = 200
_WARM_UP = 50
_CALM = 0.05
"""Standard deviation of the scaled steps, as a share of their mean."""


def record(folder: Path, launches: int, steps: int) -> None:
    """Train the same model several times; the database is in the folder."""
    with collector(folder) as running:
        for number in range(launches):
            train(running.url, f"launch-{number}", steps=steps)


def drawn(times: RunTimes, count: int, random: np.random.Generator, factor: float = 1.0) -> RunTimes:
    """Return a run of `count` steps made of blocks of the recorded steps; `factor` is of the phase that is longer."""
    blocks = -(-count // _BLOCK)
    size = min(_BLOCK, count)
    begins = random.integers(_WARM_UP, len(times.step) - size + 1, blocks)
    rows = (begins[:, None] + np.arange(size)).ravel()[:count]
    phases = {name: values[rows] for name, values in times.phases_ns.items()}
    extra = (factor - 1) * phases[PHASE]
    phases[PHASE] = phases[PHASE] + extra
    return RunTimes(np.arange(count) + _WARM_UP, times.step_ns[rows] + extra, phases, times.run_delay_ns[rows])


def scaled(times: RunTimes, deviation: float) -> RunTimes:
    """Return the run with smaller deviations: the step's standard deviation is a share of its mean."""
    typical = times.step_ns[times.is_typical()]
    factor = deviation / float(typical.std() / typical.mean())

    def shrink(values: Floats) -> Floats:
        mean = values[times.is_typical()].mean()
        return np.asarray(np.maximum(mean + factor * (values - mean), 0.0))

    phases = {name: shrink(values) for name, values in times.phases_ns.items()}
    return RunTimes(times.step, shrink(times.step_ns), phases, factor * times.run_delay_ns)


def draw_pairs(times: RunTimes, count: int, pairs: int) -> dict[str, Any]:
    """Return the shares of pairs in which a difference was seen, of equal runs and of runs with a longer phase."""
    random = np.random.default_rng(count)
    row: dict[str, Any] = dict.fromkeys(("judged", "step_differs", "any_differs", "fails", "found", "exceeded"), 0)
    smallest = []
    for _ in range(pairs):
        equal = compare(drawn(times, count, random), drawn(times, count, random))
        verdicts = {change.name: change.verdict for change in equal.changes if change.kind in ("step", "phase")}
        differs = {name for name, verdict in verdicts.items() if verdict in ("slower", "faster")}
        row["judged"] += verdicts["step"] != "too-few"
        row["step_differs"] += "step" in differs
        row["any_differs"] += bool(differs)
        row["fails"] += bool(equal.exceeded(LIMIT))
        slower = compare(drawn(times, count, random), drawn(times, count, random, SLOWER))
        changes = {change.name: change for change in slower.changes}
        row["found"] += changes[PHASE].verdict == "slower"
        row["exceeded"] += PHASE in slower.exceeded(LIMIT)
        smallest.append(changes[PHASE].ratio(changes[PHASE].smallest_ns) or 0.0)
    return {
        "steps": count,
        **{name: hits / pairs for name, hits in row.items()},
        "smallest": float(np.median(smallest)),
    }


def measure(folder: Path, pairs: int) -> dict[str, Any]:
    """Return the figures of the launches in the folder."""
    store = Store(f"sqlite:///{folder}/runs.db", read_only=True)
    runs = sorted(store.runs(100), key=lambda run: run.run)
    launches = []
    for a, b in combinations(runs, 2):
        sides = [Side(run.run, run.attempt, {"findings": []}) for run in (a, b)]
        answer = compare_json(store, sides[0], sides[1], LIMIT)
        step = answer["changes"][0]
        launches.append({name: step[name] for name in ("change_ratio", "low_ratio", "high_ratio", "verdict")})
        launches[-1] |= {"a": a.run, "b": b.run, "disturbed": answer["disturbed"], **answer["limit"]}
    times = [read_times(store, run.run, run.attempt, store.sources(run.run, run.attempt)) for run in runs]
    calmest = min(times, key=lambda run: float(run.run_delay_ns.mean()))
    typical = calmest.step_ns[calmest.is_typical()]
    mean = dependent_mean(typical)
    return {
        "step_ms": mean.mean / 1e6,
        "deviation": float(typical.std() / typical.mean()),
        "dependent_steps": mean.block_length,
        "phase_share": float(calmest.phases_ns[PHASE].mean() / calmest.step_ns.mean()),
        "drawn": [draw_pairs(calmest, count, pairs) for count in COUNTS],
        "scaled": [draw_pairs(scaled(calmest, _CALM), count, pairs) for count in COUNTS],
        "launches": launches,
    }


def halves() -> None:
    """Print how often the halves of balanced runs differ, and how often a second half that takes longer is found."""
    counts = dict.fromkeys(("compared", "differ", "of these disturbed", "over the limit"), 0)
    found = dict.fromkeys((1.2, 1.5, 2.2), 0)
    lengths = []
    for run in load(RUNS):
        if run.expected is None:
            times = run_times(run.evidence.steps.select(np.lexsort((run.evidence.rank, run.evidence.steps.step))))
            rows = np.flatnonzero(times.step >= WARM_UP)
            half = len(rows) // 2
            lengths.append(half)
            first, second = (_part(times, rows[begin : begin + half], 1.0) for begin in (0, half))
            result = compare(first, second)
            counts["compared"] += 1
            counts["differ"] += result.changes[0].verdict in ("slower", "faster")
            counts["of these disturbed"] += result.is_disturbed
            counts["over the limit"] += result.is_decided(LIMIT) and bool(result.exceeded(LIMIT))
            for factor in found:
                longer = compare(first, _part(times, rows[half : 2 * half], factor))
                found[factor] += longer.changes[0].verdict == "slower"
    print(f"halves of {min(lengths)} to {max(lengths)} steps, median {np.median(lengths):.0f}")
    print(", ".join(f"{name} {count}" for name, count in counts.items()))
    print(", ".join(f"{factor} times as long: {hits} found" for factor, hits in found.items()))


def _part(times: RunTimes, rows: Ints, factor: float) -> RunTimes:
    """Return some steps, each `factor` as long, numbered from the first that is not left out."""
    phases = {name: factor * values[rows] for name, values in times.phases_ns.items()}
    return RunTimes(np.arange(len(rows)) + WARM_UP, factor * times.step_ns[rows], phases, times.run_delay_ns[rows])


def print_tables(figures: dict[str, Any]) -> None:
    """Print the figures."""
    print(
        f"step {figures['step_ms']:.1f} ms, standard deviation {figures['deviation']:.1%}, "
        f"{figures['dependent_steps']:.0f} steps depend on each other; {PHASE} has {figures['phase_share']:.0%}"
    )
    for title, rows in (("as recorded", figures["drawn"]), (f"scaled to {_CALM:.0%}", figures["scaled"])):
        print(f"\n{title}")
        print("| steps | judged | step differs | any differs | fails over 3 % | 5 % found | over 3 % | smallest |")
        print("|---|---|---|---|---|---|---|---|")
        for row in rows:
            names = ("judged", "step_differs", "any_differs", "fails", "found", "exceeded", "smallest")
            print(f"| {row['steps']} | {' | '.join(f'{row[name]:.1%}' for name in names)} |")
    print("\n| launches | step | verdict | limit 3 % |\n|---|---|---|---|")
    for row in figures["launches"]:
        kept = "exceeded" if row["exceeded"] else "kept"
        limit = kept if row["decided"] else "not decided" + (", disturbed" if row["disturbed"] else "")
        interval = f"{row['change_ratio']:+.1%} ({row['low_ratio']:+.1%} to {row['high_ratio']:+.1%})"
        print(f"| {row['a']}, {row['b']} | {interval} | {row['verdict']} | {limit} |")


def main() -> None:
    """Record, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="few steps, to see that it runs")
    parser.add_argument("--halves", action="store_true", help="compare the halves of kept runs instead")
    options = parser.parse_args()
    if options.halves:
        halves()
        return
    launches, steps, times = (2, 300, 5) if options.smoke else (options.launches, options.steps, options.times)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "runs.db").exists():
            record(folder, launches, steps)
        figures = measure(folder, times)
    print_tables(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
