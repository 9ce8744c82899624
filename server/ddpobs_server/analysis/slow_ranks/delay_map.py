"""The delay that each rank caused, over steps and ranks: the data of a heat map of bounded size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.slow_ranks.lateness_bins import DelayBins
from ddpobs_server.analysis.steps.joined_steps import Floats


@dataclass(frozen=True)
class DelayMap:
    """Mean delay per step, by bin of consecutive steps and by rank.

    Attributes:
        first: First step of each bin, shape [bins].
        last: Last step, same shape.
        ranks: Shape [ranks].
        delay_ns: Time that a step of the bin lost to the rank, shape [bins, ranks].
        late_share: Share of all steps in which the rank was late, shape [ranks].
        cost_ns: Mean delay over all steps, shape [ranks].
    """

    first: wire.Ints
    last: wire.Ints
    ranks: wire.Ints
    delay_ns: Floats
    late_share: Floats
    cost_ns: Floats

    def select(self, columns: wire.Ints) -> DelayMap:
        """Return some ranks, in this order."""
        return DelayMap(
            self.first,
            self.last,
            self.ranks[columns],
            self.delay_ns[:, columns],
            self.late_share[columns],
            self.cost_ns[columns],
        )


def delay_map(bins: DelayBins, most: int) -> DelayMap:
    """Return the delay in at most `most` bins, from at least one bin."""
    begins = np.arange(0, len(bins), -(-len(bins) // most))
    ends = np.append(begins[1:], len(bins))
    steps = np.add.reduceat(bins.steps, begins)
    total = max(1, int(bins.steps.sum()))
    return DelayMap(
        first=bins.first[begins],
        last=bins.last[ends - 1],
        ranks=bins.ranks,
        delay_ns=np.add.reduceat(bins.cost_ns, begins, axis=0) / np.maximum(1, steps)[:, None],
        late_share=bins.late.sum(axis=0) / total,
        cost_ns=bins.cost_ns.sum(axis=0) / total,
    )
