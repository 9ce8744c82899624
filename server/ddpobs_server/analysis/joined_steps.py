"""Rows of many ranks to matrices, joined by the collective that all ranks took part in."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ddpobs import wire

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Joined:
    """Steps in which every rank's own time is known.

    Attributes:
        collective: Sequence numbers, shape [steps].
        step: Rank-local step numbers of the first rank, shape [steps].
        ranks: Shape [ranks].
        own_ns: Own time, shape [steps, ranks].
        phases_ns: Own time by `wire.OWN_PHASES`, shape [steps, ranks, phases].
        wall_ns: Shape [steps, ranks].
        exposed_ns: Exposed communication, shape [steps, ranks].
    """

    collective: wire.Ints
    step: wire.Ints
    ranks: wire.Ints
    own_ns: Floats
    phases_ns: Floats
    wall_ns: Floats
    exposed_ns: Floats

    def __len__(self) -> int:
        return len(self.collective)

    def latest(self, count: int) -> Joined:
        """The last so many steps."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return Joined(**{name: v if name == "ranks" else v[-count:] for name, v in columns.items()})

    @cached_property
    def step_ns(self) -> Floats:
        """Each step's wall time, the median over ranks, shape [steps]."""
        return np.median(self.wall_ns, axis=1)

    @cached_property
    def followed(self) -> npt.NDArray[np.bool_]:
        """Whether the step after each one is among these, too; shape [steps]. A step may have several collectives."""
        return np.append(np.diff(self.step) == 1, False)[: len(self)]

    @cached_property
    def window_ns(self) -> Floats:
        """From one synchronisation to the next, as own times are measured, shape [steps].

        A step ends later than its synchronisation. Where ranks wait in between for one that is late, as at a barrier,
        that wait is in the wall time of the step before the one whose own time shows it.
        """
        last_own_ns = self.own_ns.max(axis=1)
        before_ns = np.maximum(0.0, last_own_ns - self.step_ns)
        after_ns = np.where(self.followed, np.append(before_ns[1:], 0.0)[: len(self)], 0.0)
        return np.asarray(np.maximum(self.step_ns + before_ns - after_ns, last_own_ns))


def ranks_of(rank: wire.Ints) -> tuple[wire.Ints, wire.Ints]:
    """The ranks there are, rising, and of each row the place of its own; ranks are small, and need no sorting."""
    there = np.bincount(rank) > 0
    return np.flatnonzero(there), (np.cumsum(there) - 1)[rank]


def join(rank: wire.Ints, steps: wire.Steps) -> Joined:
    """The collectives that every rank has, without steps that took no time or whose own time has no clean origin.

    Args:
        rank: Of each row, shape [rows].
        steps: Columns, each of shape [rows].
    """
    known = (steps.own_ns >= 0) & (steps.collective >= 0) & (steps.end_ns > steps.start_ns)
    usable = np.flatnonzero(((steps.flags & wire.NO_ORIGIN) == 0) & known)
    ranks, _ = ranks_of(rank)
    order = usable[np.lexsort((rank[usable], steps.collective[usable]))]
    collective, counts = np.unique(steps.collective[order], return_counts=True)
    complete = collective[counts == len(ranks)]
    rows = order[np.isin(steps.collective[order], complete)].reshape(len(complete), len(ranks))

    def matrix(name: str) -> Floats:
        return np.asarray(getattr(steps, name)[rows], np.float64)

    return Joined(
        collective=complete,
        step=steps.step[rows[:, 0]] if len(rows) else complete,
        ranks=ranks,
        own_ns=matrix("own_ns"),
        phases_ns=np.stack([matrix(f"own_{phase}_ns") for phase in wire.OWN_PHASES], axis=-1),
        wall_ns=np.asarray((steps.end_ns - steps.start_ns)[rows], np.float64),
        exposed_ns=matrix("exposed_comm_ns"),
    )


def silent_ranks(rank: wire.Ints, steps: wire.Steps) -> wire.Ints:
    """Ranks without a row in the later half of all collectives looked at: nothing tells what they do now."""
    ranks, place = ranks_of(rank)
    known = steps.collective >= 0
    if not known.any():
        return ranks[:0]
    last = np.full(len(ranks), wire.UNKNOWN, np.int64)
    np.maximum.at(last, place[known], steps.collective[known])
    ahead = steps.collective[known & (last == last.max())[place]]
    return np.asarray(ranks[last < (int(ahead.min()) + int(ahead.max())) // 2])


def median_of_others(values: Floats) -> Floats:
    """For each rank the median over all the other ranks.

    Args:
        values: Shape [steps, ranks, ...] with at least two ranks.

    Returns:
        The same shape. With the median of all, two ranks would show half of what sets them apart.
    """
    others = values.shape[1] - 1
    low, high = (others - 1) // 2, others // 2
    middle = np.partition(values, range(low, high + 2), axis=1)

    def nth(place: int) -> Floats:
        """The so-manieth of the others: one further on for those that lie before it themselves."""
        at, following = middle[:, place, None], middle[:, place + 1, None]
        return np.where(values > at, at, following)

    return np.asarray((nth(low) + nth(high)) / 2)


def mean_over_ranks(steps: wire.Steps) -> dict[str, wire.Ints]:
    """Wall time and phases of each step, the mean over the ranks that have it, in ns; and how many these are.

    Args:
        steps: Sorted by step.
    """
    begins = np.flatnonzero(np.diff(steps.step, prepend=-1))
    ranks = np.diff(begins, append=len(steps.step))
    times = {"wall_ns": steps.end_ns - steps.start_ns} | {
        f"{phase}_ns": getattr(steps, f"{phase}_ns") for phase in wire.PHASES
    }
    means = {
        name: np.add.reduceat(values, begins) // ranks if len(begins) else values for name, values in times.items()
    }
    return {"step": steps.step[begins], "ranks": ranks, **means}
