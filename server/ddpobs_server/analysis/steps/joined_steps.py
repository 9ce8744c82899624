"""Match the steps of all ranks by collective: the store's rows become matrices of steps and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ddpobs import wire

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class JoinedSteps:
    """Steps for which the own time of every rank is recorded.

    Attributes:
        collective: Sequence numbers, shape [steps].
        step: Rank-local step numbers of the first rank, shape [steps].
        ranks: Shape [ranks].
        own_ns: Own time without compilations, shape [steps, ranks].
        compile_ns: Time in compilations, shape [steps, ranks].
        phases_ns: Own time without compilations by `wire.OWN_PHASES`, shape [steps, ranks, phases].
        wall_ns: Shape [steps, ranks].
        exposed_ns: Exposed communication, shape [steps, ranks].
        row: Index of each step and rank in the columns that were joined, shape [steps, ranks].
    """

    collective: wire.Ints
    step: wire.Ints
    ranks: wire.Ints
    own_ns: Floats
    compile_ns: Floats
    phases_ns: Floats
    wall_ns: Floats
    exposed_ns: Floats
    row: wire.Ints

    def __len__(self) -> int:
        return len(self.collective)

    def latest(self, count: int) -> JoinedSteps:
        """Return the last `count` steps."""
        return self if count >= len(self) else self.select(slice(-count, None))

    def between(self, first: int, last: int) -> JoinedSteps:
        """Return the steps with the first rank's numbers `first` to `last`."""
        return self.select(slice(*np.searchsorted(self.step, [first, last + 1])))

    def of_ranks(self, ranks: Sequence[int]) -> JoinedSteps:
        """Return the steps of some of the ranks."""
        index = np.flatnonzero(np.isin(self.ranks, ranks))
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        by_step = ("collective", "step")
        return JoinedSteps(
            **{
                name: v if name in by_step else v[index] if name == "ranks" else v[:, index]
                for name, v in columns.items()
            }
        )

    def select(self, rows: slice) -> JoinedSteps:
        """Return some of the steps."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return JoinedSteps(**{name: v if name == "ranks" else v[rows] for name, v in columns.items()})

    @cached_property
    def step_ns(self) -> Floats:
        """Wall time of each step, the median over ranks, shape [steps]."""
        return np.median(self.wall_ns, axis=1)

    @cached_property
    def usual_own_ns(self) -> Floats:
        """Median own time of each rank, shape [ranks]."""
        return np.asarray(np.median(self.own_ns, axis=0))

    @cached_property
    def lower_median_phases_ns(self) -> Floats:
        """Own time by phase of the lower median rank in that phase, shape [steps, phases]."""
        middle = (len(self.ranks) - 1) // 2
        # One phase after another: a copy of all phases of a thousand ranks would be large.
        by_phase = np.moveaxis(self.phases_ns, -1, 0)
        return np.stack([np.partition(times_ns, middle, axis=1)[:, middle] for times_ns in by_phase], axis=-1)

    @cached_property
    def has_successor(self) -> npt.NDArray[np.bool_]:
        """Whether the next step is joined too, shape [steps]. A step may have several collectives."""
        return np.append(np.diff(self.step) == 1, False)[: len(self)]

    @cached_property
    def window_ns(self) -> Floats:
        """Time from one synchronisation to the next, which own times are measured in, shape [steps].

        A step ends later than its synchronisation. If the ranks wait for a late rank after it, as at a barrier, the
        wait is in the wall time of this step. The late rank's own time is in the next step.
        """
        last_own_ns = (self.own_ns + self.compile_ns).max(axis=1)
        before_ns = np.maximum(0.0, last_own_ns - self.step_ns)
        after_ns = np.where(self.has_successor, np.append(before_ns[1:], 0.0)[: len(self)], 0.0)
        return np.asarray(np.maximum(self.step_ns + before_ns - after_ns, last_own_ns))


def index_ranks(rank: wire.Ints) -> tuple[wire.Ints, wire.Ints]:
    """Return the distinct ranks in rising order, and for each row the index of its rank among them.

    Ranks are small numbers, so they are counted and not sorted.
    """
    present = np.bincount(rank) > 0
    return np.flatnonzero(present), (np.cumsum(present) - 1)[rank]


def join(rank: wire.Ints, steps: wire.Steps) -> JoinedSteps:
    """Join the ranks' rows by collective.

    A collective is left out if any rank has no row for it. So is a step that took no time, or that has no clean origin
    of its own time.

    Args:
        rank: Rank of each row, shape [rows].
        steps: Columns, each of shape [rows].
    """
    complete_row = (steps.own_ns >= 0) & (steps.collective >= 0) & (steps.end_ns > steps.start_ns)
    usable = np.flatnonzero(((steps.flags & wire.NO_ORIGIN) == 0) & complete_row)
    ranks = np.flatnonzero(np.bincount(rank))
    order = in_order(usable, steps.collective, rank)
    begins = np.flatnonzero(np.diff(steps.collective[order], prepend=-1))
    counts = np.diff(begins, append=len(order))
    is_complete = counts == len(ranks)
    complete = steps.collective[order[begins[is_complete]]]
    rows = order[np.repeat(is_complete, counts)].reshape(len(complete), len(ranks))

    def matrix(name: str) -> Floats:
        return np.asarray(getattr(steps, name)[rows], np.float64)

    # The ranks of a phase are neighbours in memory: medians over the ranks are what takes most time.
    phases_ns = np.moveaxis(np.empty((len(wire.OWN_PHASES), *rows.shape)), 0, -1)
    for index, phase in enumerate(wire.OWN_PHASES):
        phases_ns[..., index] = getattr(steps, f"own_{phase}_ns")[rows]
    compile_ns = _take_compilations(phases_ns, matrix("compile_ns"))
    return JoinedSteps(
        collective=complete,
        step=steps.step[rows[:, 0]] if len(rows) else complete,
        ranks=ranks,
        own_ns=matrix("own_ns") - compile_ns,
        compile_ns=compile_ns,
        phases_ns=phases_ns,
        wall_ns=np.asarray((steps.end_ns - steps.start_ns)[rows], np.float64),
        exposed_ns=matrix("exposed_comm_ns"),
        row=rows,
    )


def in_order(rows: wire.Ints, number: wire.Ints, rank: wire.Ints) -> wire.Ints:
    """Return some rows by their number, then by rank. Most are so already: the store sorts by step and rank."""
    numbers, ranks = number[rows], rank[rows]
    rise = np.diff(numbers)
    if ((rise > 0) | ((rise == 0) & (np.diff(ranks) >= 0))).all():
        return rows
    return rows[np.lexsort((ranks, numbers))]


def _take_compilations(phases_ns: Floats, compile_ns: Floats) -> Floats:
    """Take compilations out of the phases of own time, in place, from the longest phase first; return what was taken.

    A rank that compiles is no slower than the others: it is a finding of its own.
    """
    left_ns = np.maximum(compile_ns, 0.0)
    total_ns = left_ns.copy()
    for row in zip(*np.nonzero(left_ns), strict=True):
        for phase in np.argsort(-phases_ns[row]):
            taken_ns = max(0.0, min(left_ns[row], phases_ns[row][phase]))
            phases_ns[row][phase] -= taken_ns
            left_ns[row] -= taken_ns
    return np.asarray(total_ns - left_ns)


def silent_ranks(rank: wire.Ints, steps: wire.Steps) -> wire.Ints:
    """Return the ranks without a row in the later half of all collectives: their current work is not recorded."""
    ranks, index = index_ranks(rank)
    numbered = steps.collective >= 0
    if not numbered.any():
        return ranks[:0]
    last = np.full(len(ranks), wire.UNKNOWN, np.int64)
    np.maximum.at(last, index[numbered], steps.collective[numbered])
    ahead = steps.collective[numbered & (last == last.max())[index]]
    return np.asarray(ranks[last < (int(ahead.min()) + int(ahead.max())) // 2])


def mean_over_ranks(steps: wire.Steps) -> dict[str, wire.Ints]:
    """Return each step's wall time and phases, averaged over the ranks that have the step, and the number of these.

    Args:
        steps: Sorted by step.

    Returns:
        Columns of shape [steps]; times in ns.
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
