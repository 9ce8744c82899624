"""Ranks that are, or were, slow in stretches of the run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddpobs_server.analysis.finding import Gain, severity_of
from ddpobs_server.analysis.slow_ranks.lateness import BLOCK_STEPS, gain, largest_phases
from ddpobs_server.analysis.slow_ranks.slow_rank import SlowInTurn, SlowRank
from ddpobs_server.analysis.slow_ranks.stretches import Stretch
from ddpobs_server.analysis.slow_ranks.whole_run import MAX_FINDINGS, WholeRun


def slow_in_stretches(run: WholeRun, recent: Sequence[SlowRank], in_turn: Sequence[SlowInTurn]) -> list[SlowRank]:
    """Return each rank and phase with a slow stretch that no other slowness has, the costliest first.

    Args:
        run: The run.
        recent: Ranks that are slow in the latest steps, with their intervals.
        in_turn: Ranks that are slow in turn: their intervals are explained.
    """
    claims = [({slow.rank}, slow.intervals) for slow in recent]
    claims += [(set(slow.ranks), slow.intervals) for slow in in_turn]
    claimed = [(ranks, run.covered([(part.first, part.last) for part in intervals])) for ranks, intervals in claims]
    groups: dict[tuple[int, str], list[Stretch]] = {}
    for stretch in run.stretches:
        rank = run.rank(stretch)
        if not any(rank in ranks and rows[stretch.rows].any() for ranks, rows in claimed):
            groups.setdefault((rank, run.phase(stretch)), []).append(stretch)
    slow_ranks = [_slow_rank(run, rank, phase, group) for (rank, phase), group in groups.items()]
    return sorted(slow_ranks, key=lambda slow: -slow.lost_ns)[:MAX_FINDINGS]


def _slow_rank(run: WholeRun, rank: int, phase: str, group: list[Stretch]) -> SlowRank:
    index = group[0].index
    rows = np.zeros(len(run.bins), bool)
    for stretch in group:
        rows[stretch.rows] = True
    part = run.bins.select(rows)
    ranges = [run.range_of(stretch) for stretch in group]
    begin, end = ranges[-1]
    steps, late, time_ns = int(part.steps.sum()), float(part.late[:, index].sum()), float(part.time_ns.sum())
    cost_ns, lost_ns = float(part.cost_ns[:, index].sum()), run.lost_ns(rank, rows)
    phases_ns = largest_phases(part.phase_ns[:, index].sum(axis=0) / max(1.0, late))
    goes_on = run.goes_on(end, steps)
    lost_share = cost_ns / max(1.0, time_ns)
    return SlowRank(
        rank=rank,
        phase=phase,
        steps=(ranges[0][0], end),
        steps_used=steps,
        late_share=late / steps,
        lost_share=lost_share,
        chance=max(stretch.chance for stretch in group),
        excess_ns=round(cost_ns / max(1.0, late)),
        step_ns=round(time_ns / steps),
        phase_excess_ns={name: round(ns) for name, ns in phases_ns.items()},
        severity=severity_of(lost_share if goes_on else cost_ns / run.time_ns),
        since_step=begin if goes_on and begin > run.bins.first[0] else None,
        is_over=not goes_on,
        gain=_present_gain(run, rank, ranges[-1]) if goes_on else None,
        intervals=run.intervals(ranges),
        lost_ns=lost_ns,
        run_share=lost_ns / run.time_ns,
    )


def _present_gain(run: WholeRun, rank: int, bounds: tuple[int, int]) -> Gain | None:
    """Return the gain of a stretch that goes on, over its steps with columns."""
    part, index = run.joined.between(*bounds), int(np.searchsorted(run.joined.ranks, rank))
    return gain(part, index) if len(part) >= BLOCK_STEPS else None
