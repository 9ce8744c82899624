"""Rows of many ranks to matrices, joined by the collective that all ranks took part in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddpobs import wire

Floats = npt.NDArray[np.float64]
_LEFT_OUT = wire.NO_ORIGIN | wire.FOREIGN_COLLECTIVE | wire.RESTING


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
        backward_ns: The step's own backward phase, shape [steps, ranks].
    """

    collective: wire.Ints
    step: wire.Ints
    ranks: wire.Ints
    own_ns: Floats
    phases_ns: Floats
    wall_ns: Floats
    exposed_ns: Floats
    backward_ns: Floats

    def __len__(self) -> int:
        return len(self.collective)

    def latest(self, count: int) -> Joined:
        """The last so many steps."""
        cut = {name: values if name == "ranks" else values[-count:] for name, values in vars(self).items()}
        return Joined(**cut)

    @property
    def step_ns(self) -> Floats:
        """Each step's wall time, the median over ranks, shape [steps]."""
        return np.median(self.wall_ns, axis=1)


def join(rank: wire.Ints, steps: wire.Steps) -> Joined:
    """The collectives that every rank has, without steps that took no time or whose own time has no clean origin.

    Args:
        rank: Of each row, shape [rows].
        steps: Columns, each of shape [rows].
    """
    known = (steps.own_ns >= 0) & (steps.collective >= 0) & (steps.end_ns > steps.start_ns)
    usable = np.flatnonzero(((steps.flags & _LEFT_OUT) == 0) & known)
    ranks = np.unique(rank)
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
        backward_ns=matrix("backward_ns"),
    )


def median_of_others(values: Floats) -> Floats:
    """For each rank the median over all the other ranks.

    Args:
        values: Shape [steps, ranks, ...] with at least two ranks.

    Returns:
        The same shape. With the median of all, two ranks would show half of what sets them apart.
    """
    ranks = values.shape[1]
    others = [np.median(np.delete(values, index, axis=1), axis=1) for index in range(ranks)]
    return np.stack(others, axis=1)
