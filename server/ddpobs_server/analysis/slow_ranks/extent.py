"""The extent of a slowness in the latest steps: in which steps of the whole run the rank was slow in that phase."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ddpobs_server.analysis.slow_ranks.slow_rank import SlowRank
from ddpobs_server.analysis.slow_ranks.whole_run import WholeRun

_MOSTLY = 0.75
"""Share of the cost in recent steps that stretches must hold to be the extent of a slowness."""
_FEWER = 0.7
"""Share of recent steps below which stretches with most of the cost describe a slowness better."""


def with_extent(slow: SlowRank, run: WholeRun) -> SlowRank | None:
    """Add the steps of the whole run in which the rank was slow, and the time lost in them.

    Returns:
        None if a stretch describes the slowness better: it holds most of its cost in fewer steps.
    """
    own = [s for s in run.stretches if run.rank(s) == slow.rank and run.phase(s) == slow.phase]
    ranges = [run.range_of(stretch) for stretch in own]
    index, recent = int(np.searchsorted(run.bins.ranks, slow.rank)), run.covered([slow.steps])
    cost_ns = run.bins.cost_ns[:, index]
    inside = recent & run.covered(ranges)
    if not ranges or cost_ns[inside].sum() < _MOSTLY * cost_ns[recent].sum():
        ranges.append(slow.steps)
    elif run.bins.steps[inside].sum() < _FEWER * run.bins.steps[recent].sum() or slow.since_step:
        return None
    # Bins hold no delays below a tenth of the step, those of a rank that is slow in every step are in its gain.
    gain_ns = slow.gain.step_ns * slow.steps_used if slow.gain else 0
    lost_ns = max(run.lost_ns(slow.rank, run.covered(ranges)), gain_ns)
    return replace(slow, intervals=run.intervals(ranges), lost_ns=lost_ns, run_share=lost_ns / run.time_ns)
