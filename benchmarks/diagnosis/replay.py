"""Replay kept runs with one detector of slow ranks off at a time, or with one of their constants 30 % lower or higher.

    python -m benchmarks.diagnosis.replay [RUNS] [--constants]
    python -m benchmarks.diagnosis.replay RUNS --pack FOLDER RESULTS.jsonl

For each change the table has the cases that it loses and wins, and the false findings that it adds and removes, against
the diagnosis as it is. A case is won if the finding has the ranks, the phase, the kind and the steps of its fault. A
finding about another rank, or in a balanced run, is false.

The second command packs the spools of `benchmarks.diagnosis RESULTS.jsonl --keep FOLDER` into the file RUNS. It keeps
the columns of their steps alone, so that no bucket is judged.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
from ddpobs_server.analysis.evidence import Evidence
from ddpobs_server.analysis.finding import Finding
from ddpobs_server.analysis.findings import imbalanced_batches, straggler
from ddpobs_server.analysis.slow_ranks import (
    chance,
    extent,
    in_turn,
    lateness,
    recent,
    recurrence,
    slow_rank,
    slow_stretches,
    stretches,
    turns,
    whole_run,
)
from ddpobs_server.analysis.steps.joined_steps import join

from benchmarks.causes import evidence_of
from benchmarks.diagnosis.__main__ import folder_of, read
from benchmarks.diagnosis.cases import Expected
from benchmarks.diagnosis.judge import compared, finding_about
from ddpobs import wire

RUNS = Path(__file__).with_name("runs.npz")
_MODULES = (
    chance,
    extent,
    in_turn,
    lateness,
    recent,
    recurrence,
    slow_rank,
    slow_stretches,
    stretches,
    turns,
    whole_run,
)
_FACTORS = (0.7, 1.3)
_NOTHING: dict[str, tuple[ModuleType, str, Any]] = {
    "recurring": (recent, "_recurring", {}),
    "sudden": (recent, "_suddenly_slow", {}),
    "steady": (recent, "_steadily_slow", {}),
    "steady without the run queue": (recent, "_steady_without_queue", {}),
    "seldom": (recent, "_seldom_slow", {}),
    "all of the latest steps": (straggler, "recently_slow", []),
    "stretches": (whole_run, "find_stretches", []),
    "moving": (in_turn, "find_moving", None),
    "turns by phase": (turns, "_phase_turns", []),
    "turns by step": (turns, "_periodic_turns", []),
}
"""By detector, the function that runs it, and the result with which it detects nothing."""


@dataclass(frozen=True)
class Run:
    """A kept run; a balanced run has no expected finding."""

    name: str
    expected: Expected | None
    evidence: Evidence


@dataclass(frozen=True)
class Change:
    """A name of a module with another value."""

    label: str
    module: ModuleType
    name: str
    value: Any


@dataclass(frozen=True)
class Outcome:
    """Names of the runs whose fault is found, and of false findings with their runs."""

    won: frozenset[str]
    false: frozenset[str]


def packed(folder: Path, results: Path) -> Iterator[Run]:
    """The runs of these results whose spools are kept."""
    for record in read(results):
        kept = folder_of(folder, record)
        for kind, expected in (("fault", record["expected"]), ("twin", None)):
            if (spool := kept / kind / "spool").is_dir():
                yield Run(f"{kept.name}-{kind}", Expected(**expected) if expected else None, evidence_of(spool))


def save(file: Path, runs: Iterable[Run]) -> None:
    """Write the steps of runs into one file."""
    index: list[tuple[str, dict[str, Any] | None]] = []
    tables: dict[str, Any] = {}
    for run in runs:
        index.append((run.name, vars(run.expected) if run.expected else None))
        # Differences from row to row are small, and compress to a fifth.
        table = np.vstack([run.evidence.rank, run.evidence.steps.table])
        tables[run.name] = np.diff(table, axis=1, prepend=0)
    np.savez_compressed(file, index=np.array(json.dumps(index)), **tables)


def load(file: Path) -> Iterator[Run]:
    """Read the runs of a file."""
    stored = np.load(file)
    for name, expected in json.loads(str(stored["index"])):
        rank, *columns = np.cumsum(stored[name], axis=1)
        defaults = list(wire.Steps.defaults.values())
        added_since = defaults[len(defaults) + len(columns) - len(wire.Steps.ranges) :]
        columns += [np.full(len(rank), default) for default in added_since]
        steps = wire.Steps.from_table(np.array(columns))
        evidence = Evidence(rank=rank, steps=steps, joined=join(rank, steps))
        yield Run(name, Expected(**expected) if expected else None, evidence)


def outcome(runs: list[Run]) -> Outcome:
    """Diagnose all runs."""
    won, false = set(), set()
    for run in runs:
        fresh = replace(run.evidence)  # Evidence keeps results that several findings use.
        findings = [each.as_json() for each in straggler.straggler(fresh) if isinstance(each, Finding)]
        expected = None if run.expected is None else replace(run.expected, layer=None, cause=None)
        right = finding_about(findings, expected) if expected else None
        if expected and right and all(compared(right, expected, None).values()):
            won.add(run.name)
        own = set(expected.ranks) if expected else set()
        false |= {f"{run.name}: {each['verdict']}" for each in findings if not set(each["ranks"]) <= own}
    return Outcome(frozenset(won), frozenset(false))


@contextmanager
def changed(change: Change) -> Iterator[None]:
    """Replace a name in its module and in those that import it."""
    before = vars(change.module)[change.name]
    users = {change.module} if change.name.startswith("_") else {*_MODULES, straggler, imbalanced_batches}
    with ExitStack() as stack:
        for module in users:
            if vars(module).get(change.name) is before:
                stack.enter_context(patch.object(module, change.name, change.value))
        yield


def detector_changes() -> Iterator[Change]:
    """Each detector, off."""
    for label, (module, name, nothing) in _NOTHING.items():
        yield Change(f"without {label}", module, name, partial(_returned, nothing))


def _returned(nothing: Any, *_: Any, **__: Any) -> Any:
    return nothing


def constant_changes() -> Iterator[Change]:
    """Each constant, lower and higher."""
    for module, name, value in constants():
        for factor in _FACTORS:
            label = f"`{module.__name__.rpartition('.')[2]}.{name}` {100 * (factor - 1):+.0f} %"
            yield Change(label, module, name, scaled(value, factor))


def constants() -> Iterator[tuple[ModuleType, str, Any]]:
    """The numbers that the modules define, in the order of their code."""
    for module in _MODULES:
        for node in ast.parse(inspect.getsource(module)).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
            for name in names:
                if name.strip("_").isupper() and scaled(vars(module)[name], 1.0) is not None:
                    yield module, name, vars(module)[name]


def scaled(value: Any, factor: float) -> Any:
    """Return a number, the numbers of a tuple or the values of a dictionary times a factor; None of anything else."""
    if isinstance(value, float):
        return min(1.0, value * factor) if value <= 1 else value * factor  # Shares stay shares.
    if isinstance(value, int):
        return max(1, round(value * factor))
    if isinstance(value, tuple):
        return tuple(scaled(each, factor) for each in value)
    if isinstance(value, dict):
        return {key: scaled(each, factor) for key, each in value.items()}
    return None


def table(runs: list[Run], changes: Iterator[Change]) -> Iterator[str]:
    """The lines of a Markdown table, a row for each change; changes without any effect are counted at its end."""
    base, without_effect = outcome(runs), []
    faults = sum(run.expected is not None for run in runs)
    yield f"As it is: {len(base.won)} of {faults} faults, {len(base.false)} false findings in {len(runs)} runs.\n"
    yield "| change | cases lost | cases won | false findings added | removed |\n|---|---|---|---|---|"
    for change in changes:
        with changed(change):
            now = outcome(runs)
        lost, won = sorted(base.won - now.won), sorted(now.won - base.won)
        if now == base:
            without_effect.append(change.label)
            continue
        cells = [f"{len(names)}{': ' * bool(names)}{', '.join(names)}" for names in (lost, won)]
        cells += [str(len(now.false - base.false)), str(len(base.false - now.false))]
        yield f"| {change.label} | {' | '.join(cells)} |"
    yield f"\nWithout any effect: {', '.join(without_effect) or 'none'}."


def main() -> None:
    """Pack runs, or replay them and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?", default=RUNS)
    parser.add_argument("--constants", action="store_true", help="change the constants, not the detectors")
    parser.add_argument("--pack", type=Path, nargs=2, metavar=("FOLDER", "RESULTS"))
    options = parser.parse_args()
    if options.pack:
        save(options.runs, packed(*options.pack))
        return
    for line in table(list(load(options.runs)), constant_changes() if options.constants else detector_changes()):
        print(line, flush=True)


if __name__ == "__main__":
    main()
