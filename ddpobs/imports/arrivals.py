"""Who arrived last, of the ranks' own traces alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ddpobs import wire
from ddpobs.ranks.straggler_exchange import join, rows_of, statistics
from ddpobs.shared.delay import delays, excesses


class Arrival(NamedTuple):
    """A rank that arrived last.

    Attributes:
        rank: Number of the rank.
        last: Number of steps in which it was the last.
        steps: Number of steps that all ranks can be compared in.
        delay_ns: Its median delay in these, against the median of the other ranks.
        phase: Phase of its own time with the largest excess in these.
    """

    rank: int
    last: int
    steps: int
    delay_ns: int
    phase: str

    def __str__(self) -> str:
        late = f"{self.delay_ns / 1e6:.3g} ms after the others (median), most of it in {self.phase}"
        return f"rank {self.rank} arrived last in {self.last} of {self.steps} steps: {late}"


def arrivals(steps: Sequence[wire.Steps], ranks: Sequence[int]) -> list[Arrival]:
    """Return the ranks that arrived after the others in a step, the most frequent first; empty if none did.

    Without two ranks or a common step none did.

    Args:
        steps: Steps of each rank.
        ranks: Their numbers, in the same order.
    """
    if len(ranks) < 2:
        return []
    joined = join([rows_of(one) for one in steps])
    if not len(joined):
        return []
    phases_ns = joined[:, :, -len(wire.OWN_PHASES) :].astype(np.float64)
    own_ns = phases_ns.sum(axis=2)
    last, delay_ns = delays(own_ns, excesses(own_ns))
    excess_ns = excesses(phases_ns)
    found = []
    for index in np.unique(last[delay_ns > 0]).tolist():
        rows = np.flatnonzero((last == index) & (delay_ns > 0))
        phase = wire.OWN_PHASES[int(np.median(excess_ns[rows, index], axis=0).argmax())]
        found.append(Arrival(ranks[index], len(rows), len(joined), int(np.median(delay_ns[rows])), phase))
    return sorted(found, key=lambda one: -one.last)


def common_steps(steps: Sequence[wire.Steps]) -> int:
    """Number of steps in which all these ranks can be compared."""
    return len(join([rows_of(one) for one in steps]))


def peers(steps: Sequence[wire.Steps], ranks: Sequence[int]) -> wire.Peers | None:
    """Compare the ranks as the first of them does in a live run; None without two ranks or a common step."""
    if len(ranks) < 2:
        return None
    joined = join([rows_of(one) for one in steps])
    return statistics(joined, ranks) if len(joined) else None
