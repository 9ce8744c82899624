"""Runs whose answer is known, as the store gives them: stated own times, each rank on its own clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ddpobs import wire
from tests.columns import make_spans, make_steps

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
    """Own times of shape [collectives, ranks, own phases] in ns, noisy as on shared cores.

    Every phase varies by a tenth, log-normally; one backward in ten has an exponential spike of 30 ms on average. With
    `burst_steps` a rank is also held up in bursts that last about so many steps, as by another process.
    """
    random = np.random.default_rng(seed)
    base = np.array([BASE_MS[phase] for phase in wire.OWN_PHASES])
    own = base * np.exp(random.normal(0, 0.1, (collectives, ranks, len(base))))
    backward = own[:, :, wire.OWN_PHASES.index("backward")]
    backward += (random.random((collectives, ranks)) < 0.1) * random.exponential(30.0, (collectives, ranks))
    if burst_steps:
        backward += 12.0 * np.maximum(0.0, _bursts(random, collectives, ranks, np.exp(-1 / burst_steps)))
    for one in slow:
        own[:, one.rank, wire.OWN_PHASES.index(one.phase)] += one.ms * (random.random(collectives) < one.share)
    return (own * MS).astype(np.int64)


def columns(own: wire.Ints, moving_ms: float = 3.0, barrier: bool = False) -> tuple[wire.Ints, wire.Steps]:
    """The steps of a synchronous run with these own times: who is early waits in exposed communication.

    With a barrier, after what a rank does between two steps, its wait is in the step before.
    """
    count, ranks, _ = own.shape
    total = own.sum(axis=2)
    moving = int(moving_ms * MS)
    exposed = total.max(axis=1, keepdims=True) - total + moving
    wall = total + exposed
    if barrier:
        between = own[:, :, wire.OWN_PHASES.index("other")]
        waited = between.max(axis=1, keepdims=True) - between
        exposed -= np.minimum(waited, exposed - moving)
        exposed[:-1] += waited[1:]
        wall = total - between + exposed
        wall[:-1] += between[1:]
    # Ranks were started at different times, so their clocks differ by hours.
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


def spans(rank: list[int], rows: list[tuple[int, int, int, int, int]]) -> tuple[wire.Ints, wire.Spans]:
    """Spans of module 0, revision 0, from rows of (step, bucket, ready, launched, done)."""
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
    """Steps of which only the numbers matter."""
    return rank, make_steps(step=step, collective=collective)


def changed(columns: Columns, **new: wire.Ints) -> Columns:
    """The columns with some of them replaced."""
    return type(columns)(**{name: new.get(name, getattr(columns, name)) for name in columns.names})


def kept(rank: wire.Ints, steps: wire.Steps, rows: npt.NDArray[np.bool_]) -> tuple[wire.Ints, wire.Steps]:
    """Only some rows."""
    return rank[rows], wire.Steps(**{name: getattr(steps, name)[rows] for name in steps.names})


def flat(matrix: npt.NDArray[np.generic]) -> wire.Ints:
    """[steps, ranks] as the store's rows: by step, then rank."""
    return np.ascontiguousarray(matrix).reshape(-1).astype(np.int64)


def _bursts(random: np.random.Generator, collectives: int, ranks: int, memory: float) -> Floats:
    level = random.normal(size=(collectives, ranks))
    for step in range(1, collectives):
        level[step] = memory * level[step - 1] + np.sqrt(1 - memory**2) * level[step]
    return level
