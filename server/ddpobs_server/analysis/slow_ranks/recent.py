"""Ranks that are slow in the latest steps: often, since a short while, a little in every step, or seldom but long."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ddpobs_server.analysis.finding import severity_of
from ddpobs_server.analysis.slow_ranks.chance import beyond_chance
from ddpobs_server.analysis.slow_ranks.lateness import (
    Lateness,
    cost_shares,
    gain,
    lateness,
    slow_phases,
    steady_lateness,
    step_weights,
    typical_lateness,
)
from ddpobs_server.analysis.slow_ranks.recurrence import costly_ranks, onset, recurring_ranks, steady_levels
from ddpobs_server.analysis.slow_ranks.slow_rank import SlowRank
from ddpobs_server.analysis.steps.joined_steps import JoinedSteps

_SUDDEN = {128: 0.1, 64: 0.2}
"""Numbers of latest steps that are also judged by themselves, and the least cost share in each of their quarters.

A rank that has just become slow is not slow in all quarters of the judged steps. A burst of noise may fill so few
steps, so the rank must also be late in `_SUDDEN_LATE_SHARE` of each quarter."""
_SUDDEN_LATE_SHARE = 0.8
_OWN_LEVEL_SHARE = 0.9
"""Minimum share of a rank's usual excess that remains without its time in the run queue, to leave that time out."""


def recently_slow(joined: JoinedSteps, undisturbed: JoinedSteps | None) -> list[SlowRank]:
    """Judge all steps, then the latest steps by themselves, then small delays of every step, then rare long delays.

    A small delay of every step may be seen only without the time in the run queue: other processes disturb each step
    by more. A rank that such a delay explains is described without that time. Beside a rank that the run queue makes
    late, no other rank is judged so: it waits for that rank, and the split of that rank's time has an error.

    Args:
        joined: The compared steps.
        undisturbed: The same steps without the ranks' time in the run queue; None if it is not known.
    """
    late = lateness(joined)
    slow = _recurring(joined, late)
    steady_without_queue = _steady_without_queue(undisturbed, late, list(slow))
    for index in set(slow) & set(steady_without_queue):
        own = steady_without_queue[index]
        if own.excess_ns >= _OWN_LEVEL_SHARE * slow[index].excess_ns:
            slow[index] = replace(own, severity=severity_of(own.lost_share))
    slow |= _suddenly_slow(joined, late, set(slow))
    steady = _steadily_slow(joined, late) | steady_without_queue
    slow |= {index: steady[index] for index in steady if index not in slow}
    slow |= _seldom_slow(joined, late, set(slow))
    return list(slow.values())


def _recurring(joined: JoinedSteps, late: Lateness) -> dict[int, SlowRank]:
    """Return each rank that is late again and again, by its index."""
    levels_ns = steady_levels(joined, late)
    chances = beyond_chance(late.late, recurring_ranks(joined, late), late.excess_ns)
    return {
        index: _slow_rank(joined, late, index, chance, level_ns=levels_ns.get(index))
        for index, chance in chances.items()
    }


def _steady_without_queue(undisturbed: JoinedSteps | None, late: Lateness, recurring: list[int]) -> dict[int, SlowRank]:
    if undisturbed is None:
        return {}
    without_queue = lateness(undisturbed)
    if any(_late_by_the_queue(late, without_queue, index) for index in recurring):
        return {}
    return {
        index: replace(slow, without_queue=True) for index, slow in _steadily_slow(undisturbed, without_queue).items()
    }


def _late_by_the_queue(late: Lateness, without_queue: Lateness, index: int) -> bool:
    """Whether time in the run queue is most of the excess of a rank in the steps in which it is late."""
    rows = late.late[:, index]
    left_ns, excess_ns = (np.median(judged.excess_ns[rows, index]) for judged in (without_queue, late))
    return bool(left_ns < excess_ns / 2)


def _steadily_slow(joined: JoinedSteps, late: Lateness) -> dict[int, SlowRank]:
    """Return each rank that is slow in every step, by its index."""
    slow = {}
    for index, level_ns in steady_levels(joined, late).items():
        for chance in beyond_chance(steady_lateness(late, level_ns).late, [index], late.excess_ns).values():
            slow[index] = replace(_slow_rank(joined, late, index, chance, level_ns=level_ns), severity="info")
    return slow


def _suddenly_slow(joined: JoinedSteps, late: Lateness, named: set[int]) -> dict[int, SlowRank]:
    """Return each further rank that has become slow, judged by the steps since its onset."""
    slow: dict[int, SlowRank] = {}
    for count, min_cost_share in _SUDDEN.items():
        if len(joined) <= count:
            continue
        recent, recent_late = joined.latest(count), late.latest(count)
        recurring = set(recurring_ranks(recent, recent_late, _SUDDEN_LATE_SHARE, min_cost_share))
        for index, chance in beyond_chance(
            recent_late.late, sorted(recurring - named - set(slow)), recent_late.excess_ns
        ).items():
            steps = len(joined) - onset(late.late[:, index], float(recent_late.late[:, index].mean()))
            since_onset = _slow_rank(joined.latest(steps), late.latest(steps), index, chance)
            slow[index] = since_onset if steps == len(joined) else replace(since_onset, since_step=since_onset.steps[0])
    return slow


def _seldom_slow(joined: JoinedSteps, late: Lateness, named: set[int]) -> dict[int, SlowRank]:
    """Return each further rank that is seldom late, but costs more than chance explains."""
    suspects = [index for index in costly_ranks(joined, late) if index not in named]
    chances = beyond_chance(step_weights(joined.window_ns)[:, None] * late.cost_ns, suspects, late.excess_ns)
    return {
        index: _slow_rank(joined, typical_lateness(joined, late, index), index, chance)
        for index, chance in chances.items()
    }


def _slow_rank(
    joined: JoinedSteps, late: Lateness, index: int, chance: float, *, level_ns: float | None = None
) -> SlowRank:
    """State a rank's lateness; `level_ns` is the usual excess of a rank that is slow in every step."""
    lost_share = float(cost_shares(joined, late, np.arange(len(joined)))[index])
    if level_ns is not None:
        late = steady_lateness(late, level_ns)
    rows = np.flatnonzero(late.late[:, index])
    typical = rows if level_ns is None else rows[late.excess_ns[rows, index] <= 1.5 * level_ns]
    phases_ns = slow_phases(joined, index, typical, usual=level_ns is not None)
    medians_ns = joined.usual_own_ns.tolist()
    excess_ns, late_share = float(np.median(late.excess_ns[typical, index])), len(rows) / len(joined)
    return SlowRank(
        rank=int(joined.ranks[index]),
        phase=next(iter(phases_ns), "other"),
        steps=(int(joined.step[0]), int(joined.step[-1])),
        steps_used=len(joined),
        late_share=late_share,
        lost_share=lost_share,
        chance=chance,
        excess_ns=round(excess_ns),
        step_ns=round(float(np.median(joined.step_ns))),
        phase_excess_ns={name: round(ns) for name, ns in phases_ns.items()},
        severity=severity_of(lost_share),
        own_ns={str(rank): round(ns) for rank, ns in zip(joined.ranks.tolist(), medians_ns, strict=True)},
        gain=gain(joined, index).at_most(excess_ns * late_share),
    )
