"""The faults of the truth set, and the verdict that each must get."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.diagnosis import training
from benchmarks.diagnosis.training import Fault
from benchmarks.faults import slowing
from benchmarks.faults.launch import ROOT

TRAINING = Path(training.__file__)
SLOWING = Path(slowing.__file__)
OUTSIDE = ROOT / "tests" / "integration" / "scripts" / "outside.py"
INPUT = ROOT / "tests" / "integration" / "input_cases.py"
BALANCED: tuple[Path, str] = (TRAINING, "[]")
PHASES = ("data", "forward", "backward", "optimizer")
SHARES = (0.05, 0.1, 0.2, 0.5)
_SHORT, _LONG = 120, 180
"""Steps of a run with a fault in all its steps, and in some of them."""


@dataclass(frozen=True)
class Expected:
    """The finding that a run must get.

    Attributes:
        code: Its code; empty if no rank may be named.
        ranks: The ranks that it names; empty if it names none, or all.
        phase: Its phase.
        layer: Layer whose parameters are in the first late bucket.
        cause: Cause in its evidence.
        kind: Kind in its evidence.
        interval: Steps in which the fault held; None if they are all.
        others: Codes that the run may get besides.
    """

    code: str
    ranks: tuple[int, ...] = ()
    phase: str | None = None
    layer: int | None = None
    cause: str | None = None
    kind: str | None = None
    interval: tuple[int, int] | None = None
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """A training to start, and the verdict that it must get.

    Attributes:
        command: Script and argument.
        expected: The verdict.
        share: Delay as a share of the step, where it is known before.
        environ: Added to the environment.
        twin: Script and argument of the balanced twin.
    """

    command: tuple[Path, str]
    expected: Expected
    share: float | None = None
    environ: dict[str, str] = field(default_factory=dict)
    twin: tuple[Path, str] = BALANCED


def _training(faults: list[Fault], expected: Expected, share: float, steps: int) -> Run:
    text = json.dumps([vars(fault) for fault in faults])
    return Run((TRAINING, text), expected, share, {"STEPS": str(steps)})


def slow_rank(share: float, phase: str, draw: random.Random) -> Run:
    """A rank with more work in one phase of all steps."""
    rank = draw.randrange(2)
    layer = draw.randrange(training.LAYERS) if phase == "backward" else training.LAYERS - 1
    fault = Fault(rank, phase, share, layer=layer)
    expected = Expected("straggler", (rank,), phase, layer if phase == "backward" else None, "own-work", "persistent")
    return _training([fault], expected, share, _SHORT)


def interval(draw: random.Random) -> Run:
    """A rank with more work in some steps in the middle of the run."""
    rank, phase, share = draw.randrange(2), draw.choice(PHASES), draw.choice((0.5, 1.0))
    first, last = 60, 119
    fault = Fault(rank, phase, share, first=first, last=last)
    return _training([fault], Expected("straggler", (rank,), phase, interval=(first, last)), share, _LONG)


def onset(draw: random.Random) -> Run:
    """A rank with more work since the middle of the run."""
    rank, phase, share = draw.randrange(2), draw.choice(PHASES), draw.choice((0.5, 1.0))
    fault = Fault(rank, phase, share, first=90)
    expected = Expected("straggler", (rank,), phase, interval=(90, _LONG - 1))
    return _training([fault], expected, share, _LONG)


def moving(draw: random.Random) -> Run:
    """Work that moves to the other rank every 20 steps."""
    phase, share = draw.choice(PHASES), draw.choice((0.5, 1.0))
    faults = [
        Fault(number % 2, phase, share, first=first, last=first + 19)
        for number, first in enumerate(range(20, _LONG - 19, 20))
    ]
    return _training(faults, Expected("straggler", (0, 1), phase, kind="moving"), share, _LONG)


def turns(draw: random.Random) -> Run:
    """A rank with more work in the data of even steps, and one in the optimizer of odd ones."""
    rank, share = draw.randrange(2), draw.choice((0.3, 0.5))
    faults = [
        Fault(rank, "data", share, every=2, turn=0),
        Fault(1 - rank, "optimizer", share, every=2, turn=1),
    ]
    return _training(faults, Expected("straggler", (0, 1), kind="taking turns"), share, _SHORT)


def turns_in_one_phase(draw: random.Random) -> Run:
    """Work in one phase, on one rank in even steps and on the other rank in odd ones."""
    phase, share = draw.choice(PHASES), draw.choice((0.3, 0.5))
    faults = [Fault(rank, phase, share, every=2, turn=rank) for rank in range(2)]
    return _training(faults, Expected("straggler", (0, 1), phase, kind="taking turns"), share, _SHORT)


def seldom(draw: random.Random) -> Run:
    """A rank with much more work in every tenth step."""
    rank, phase, share = draw.randrange(2), draw.choice(PHASES), draw.choice((1.5, 3.0))
    fault = Fault(rank, phase, share, every=10, turn=draw.randrange(10))
    return _training([fault], Expected("straggler", (rank,), phase, kind="intermittent"), share, _LONG)


def sudden(draw: random.Random) -> Run:
    """A rank with more work in the latest steps of a longer run."""
    rank, phase, share = draw.randrange(2), draw.choice(PHASES), draw.choice((0.3, 0.5))
    first, steps = 330, 400
    fault = Fault(rank, phase, share, first=first)
    return _training([fault], Expected("straggler", (rank,), phase, interval=(first, steps - 1)), share, steps)


def _slowing(name: str, expected: Expected, twin: str, _: random.Random) -> Run:
    return Run((SLOWING, name), expected, environ={"STEPS": "120"}, twin=(SLOWING, twin))


def _cause(cause: str) -> Expected:
    return Expected("straggler", (slowing.SLOW,), cause=cause)


def _outside(name: str, ranks: tuple[int, ...], _: random.Random) -> Run:
    return Run((OUTSIDE, name), Expected("time-outside-steps", ranks, others=("straggler",)))


def _input(name: str, code: str, cause: str | None, _: random.Random) -> Run:
    environ = {"DDPOBS_FLUSH_S": "0.5", "DDPOBS_PULSE_S": "0.5"}
    return Run((INPUT, name), Expected(code, cause=cause), environ=environ, twin=(INPUT, "quick"))


CASES: dict[str, Callable[[random.Random], Run]] = {
    **{f"{phase} {share:.0%}": partial(slow_rank, share, phase) for share in SHARES for phase in PHASES},
    "interval": interval,
    "onset": onset,
    "moving": moving,
    "taking turns": turns,
    "taking turns in one phase": turns_in_one_phase,
    "seldom": seldom,
    "sudden": sudden,
    "neighbour": partial(_slowing, "neighbour", _cause("preempted"), "balanced"),
    "garbage": partial(_slowing, "garbage", _cause("collecting-garbage"), "balanced"),
    "paging": partial(_slowing, "paging", _cause("paging"), "balanced"),
    "longer samples": partial(_slowing, "longer", Expected("imbalanced-batches", (slowing.SLOW,)), "lengths"),
    "checkpoints": partial(_outside, "checkpoints", (0,)),
    "validation": partial(_outside, "validation", (0, 1)),
    "own loader": partial(_input, "generator", "input-bound", "own-loader"),
    "few workers": partial(_input, "few-workers", "input-bound", "few-workers"),
    "new loader a step": partial(_input, "iter-each-step", "input-bound", "new-iterators"),
    "logging": partial(_input, "logging", "other-bound", None),
}
"""Draws a run by the name of its case."""


def as_json(run: Run) -> dict[str, Any]:
    """Return a run in the form of the results."""
    return {
        "command": [run.command[0].name, run.command[1]],
        "share": run.share,
        "expected": vars(run.expected),
    }
