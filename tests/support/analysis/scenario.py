"""Synthetic runs with a given answer, in the store's form: given own times, each rank on its own clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from ddpobs_server.analysis.evidence import Evidence
from ddpobs_server.analysis.steps.joined_steps import join

from ddpobs import wire
from tests.support.columns import make_spans, make_steps

MS = 1_000_000
BASE_MS = {"data": 5.0, "forward": 20.0, "backward": 40.0, "optimizer": 8.0, "other": 2.0}
Floats = npt.NDArray[np.float64]
Columns = TypeVar("Columns", wire.Steps, wire.Spans)


@dataclass(frozen=True)
class Slow:
    """Extra own time of one rank in one phase, in a share of the steps."""

    rank: int
    phase: str
    ms: float = 40.0
    share: float = 1.0


def own_times(
    collectives: int, ranks: int, seed: int, slow: tuple[Slow, ...] = (), burst_steps: float = 0.0
) -> wire.Ints:
    """Return own times of shape [collectives, ranks, own phases] in ns, with the noise of shared cores.

    Every phase varies by a tenth, log-normally; one backward in ten has an exponential spike of 30 ms on average.
    With `burst_steps` each rank is also delayed in bursts of about this many steps, as by another process.
    """
    random = np.random.default_rng(seed)
    base = np.array([BASE_MS[phase] for phase in wire.OWN_PHASES])
    own = base * np.exp(random.normal(0, 0.1, (collectives, ranks, len(base))))
    backward = own[:, :, wire.OWN_PHASES.index("backward")]
    backward += (random.random((collectives, ranks)) < 0.1) * random.exponential(30.0, (collectives, ranks))
    if burst_steps:
        backward += 12.0 * np.maximum(0.0, _bursts(random, collectives, ranks, np.exp(-1 / burst_steps)))
    for delay in slow:
        own[:, delay.rank, wire.OWN_PHASES.index(delay.phase)] += delay.ms * (random.random(collectives) < delay.share)
    return (own * MS).astype(np.int64)


def noiseless(extra: dict[int, tuple[str, float]], steps: int = 40, ranks: int = 4) -> wire.Ints:
    """Return the base own times without noise, and extra milliseconds of some ranks in one phase."""
    own = np.tile(np.array([BASE_MS[phase] for phase in wire.OWN_PHASES]), (steps, ranks, 1))
    for rank, (phase, ms) in extra.items():
        own[:, rank, wire.OWN_PHASES.index(phase)] += ms
    return (own * MS).astype(np.int64)


def columns(own: wire.Ints, moving_ms: float = 3.0, barrier: bool = False) -> tuple[wire.Ints, wire.Steps]:
    """Return the steps of a synchronous run with these own times; an early rank waits in exposed communication.

    With a barrier after the work between two steps, the wait is in the step before.
    """
    count, ranks, _ = own.shape
    total = own.sum(axis=2)
    moving = int(moving_ms * MS)
    exposed = total.max(axis=1, keepdims=True) - total + moving
    wall = total + exposed
    if barrier:
        idle = own[:, :, wire.OWN_PHASES.index("other")]
        waits = idle.max(axis=1, keepdims=True) - idle
        exposed -= np.minimum(waits, exposed - moving)
        exposed[:-1] += waits[1:]
        wall = total - idle + exposed
        wall[:-1] += idle[1:]
    # Each rank's clock started at another time, so the clocks differ by hours.
    end = np.cumsum(wall, axis=0) + np.arange(ranks) * 3_600_000 * MS
    number = np.repeat(np.arange(count), ranks)
    phases = {f"{phase}_ns": flat(own[:, :, index]) for index, phase in enumerate(wire.OWN_PHASES)}
    return np.tile(np.arange(ranks), count), make_steps(
        step=number,
        collective=number,
        start_ns=flat(end - wall),
        end_ns=flat(end),
        exposed_comm_ns=flat(exposed),
        own_ns=flat(total),
        comm_ns=flat(exposed),
        micro_steps=1,
        samples=8,
        flags=wire.SYNCHRONISED,
        **phases,
        **{f"own_{name}": values for name, values in phases.items()},
    )


def evidence_of(rank: wire.Ints, steps: wire.Steps, **facts: Any) -> Evidence:
    """Return the evidence of these steps."""
    return Evidence(rank=rank, steps=steps, joined=join(rank, steps), **facts)


def spans(rank: list[int], rows: list[tuple[int, int, int, int, int]]) -> tuple[wire.Ints, wire.Spans]:
    """Return spans of module 0, revision 0, from rows of (step, bucket, ready, launched, done)."""
    step, bucket, ready, launched, done = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return np.array(rank, np.int64), make_spans(
        step=step,
        bucket=bucket,
        ready_ns=ready,
        launched_ns=launched,
        started_ns=wire.UNKNOWN,
        done_ns=done,
    )


def steps_of(rank: wire.Ints, step: wire.Ints, collective: wire.Ints) -> tuple[wire.Ints, wire.Steps]:
    """Return steps with these numbers and zeros in all other columns."""
    return rank, make_steps(step=step, collective=collective)


def with_columns(columns: Columns, **new: wire.Ints) -> Columns:
    """Return the table with some columns replaced."""
    return type(columns)(**{name: new.get(name, getattr(columns, name)) for name in columns.names})


def select_rows(rank: wire.Ints, steps: wire.Steps, rows: npt.NDArray[np.bool_]) -> tuple[wire.Ints, wire.Steps]:
    """Return only these rows."""
    return rank[rows], wire.Steps(**{name: getattr(steps, name)[rows] for name in steps.names})


def flat(matrix: npt.NDArray[np.generic]) -> wire.Ints:
    """Flatten [steps, ranks] to the store's rows: by step, then rank."""
    return np.ascontiguousarray(matrix).reshape(-1).astype(np.int64)


def _bursts(random: np.random.Generator, collectives: int, ranks: int, memory: float) -> Floats:
    level = random.normal(size=(collectives, ranks))
    for step in range(1, collectives):
        level[step] = memory * level[step - 1] + np.sqrt(1 - memory**2) * level[step]
    return level
