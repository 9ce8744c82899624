"""Slowness of several ranks in turn: it moves from rank to rank, or ranks are slow in different phases or steps.

No single rank stands out from the others then, though the run may lose half of its time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ddpobs import wire
from ddpobs.shared.delay import excesses, is_late, median_of_others
from ddpobs_server.analysis.slow_ranks.chance import chance_of
from ddpobs_server.analysis.slow_ranks.lateness import Lateness, lateness, step_weights
from ddpobs_server.analysis.slow_ranks.lateness_bins import LatenessBins, ideal_ns, loss_shares
from ddpobs_server.analysis.slow_ranks.recurrence import MIN_COST_SHARE, PARTS
from ddpobs_server.analysis.slow_ranks.stretches import net_cost_ns
from ddpobs_server.analysis.steps.joined_steps import Floats, JoinedSteps

MOVING_WIDTH = 4
"""Steps of the bins in which a moving slowness is looked for."""
_MIN_STRETCH_BINS, _MIN_MOVES = 2, 6
_MIN_LATE_SHARE = 0.7
_MIN_NET_SHARE = 0.1
_MIN_COVERED_AND_LOST = ((0.8, 0.1), (0.65, 0.2))
"""Minimum share of the steps that the stretches cover, and of the time that they lose; either pair suffices.

Bursts of noise cover up to three quarters of some part of a long run, but cost little."""
_MIN_ALIKE = 0.75
"""Minimum share of the stretches that cost about as much as the median stretch. Noise differs from burst to burst."""
_MIN_PERIOD_STEPS, _MAX_PERIOD = 32, 8
_MIN_TURN_SHARE = 0.8
_MIN_MEAN_SHARE = 0.02
"""A rank with a mean excess below this share of the step does not cost `MIN_COST_SHARE` in any phase."""
_MAX_CHANCE = 0.01 / len(wire.OWN_PHASES)
"""Maximum p-value of a rank in one phase; each phase is a further chance to stand out."""


@dataclass(frozen=True)
class Moving:
    """Stretches of a slowness that moves: (index of the rank, first bin, bin after the last), in order."""

    stretches: list[tuple[int, int, int]]
    begin: int
    end: int


def find_moving(bins: LatenessBins) -> Moving | None:
    """Return the stretches if slowness moves from rank to rank over most of some part of the run."""
    stretches = _owned_stretches(bins)
    begin, end = _densest(bins, stretches)
    inside = [stretch for stretch in stretches if begin <= stretch[1] and stretch[2] <= end]
    if not _is_shared(inside):
        return None
    costs = np.array([net_cost_ns(bins.cost_ns[a:b])[:, index].sum() for index, a, b in inside])
    steps = np.array([bins.steps[a:b].sum() for _, a, b in inside])
    covered, lost = steps.sum() / bins.steps[begin:end].sum(), costs.sum() / bins.time_ns[begin:end].sum()
    if all(covered < least_covered or lost < least_lost for least_covered, least_lost in _MIN_COVERED_AND_LOST):
        return None
    levels = costs / steps
    typical = float(np.median(levels))
    alike = steps[(levels > typical / 2) & (levels < 1.5 * typical)].sum() / steps.sum()
    return Moving(inside, begin, end) if alike >= _MIN_ALIKE else None


def _owned_stretches(bins: LatenessBins) -> list[tuple[int, int, int]]:
    """Return the stretches of bins in which the same rank is late, across pauses of one bin."""
    net = net_cost_ns(bins.cost_ns)
    owner = net.argmax(axis=1)
    rows = np.arange(len(bins))
    is_owned = (bins.late[rows, owner] >= _MIN_LATE_SHARE * bins.steps) & (
        net[rows, owner] >= _MIN_NET_SHARE * bins.time_ns
    )
    result: list[tuple[int, int, int]] = []
    for row in np.flatnonzero(is_owned).tolist():
        index = int(owner[row])
        if result and result[-1][0] == index and row <= result[-1][2] + 1:
            result[-1] = index, result[-1][1], row + 1
        else:
            result.append((index, row, row + 1))
    return [stretch for stretch in result if stretch[2] - stretch[1] >= _MIN_STRETCH_BINS]


def _densest(bins: LatenessBins, stretches: list[tuple[int, int, int]]) -> tuple[int, int]:
    """Return the bins (begin, end) with the highest sum of covered steps minus half of all steps."""
    covered = np.zeros(len(bins))
    for _, begin, end in stretches:
        covered[begin:end] = 1.0
    sums = np.concatenate([[0.0], np.cumsum((covered - 0.5) * bins.steps)])
    lowest = np.minimum.accumulate(sums)
    end = int((sums - lowest).argmax())
    return int(sums[: end + 1].argmin()), end


def _is_shared(stretches: list[tuple[int, int, int]]) -> bool:
    """Whether the slowness moves often enough, and no rank holds more than three quarters of the stretches."""
    owners = np.array([index for index, _, _ in stretches])
    moves = int((np.diff(owners) != 0).sum())
    return moves >= _MIN_MOVES and bool(np.bincount(owners).max() <= 0.75 * len(owners))


@dataclass(frozen=True)
class Turn:
    """A rank that is slow in its turns.

    Attributes:
        index: Index of the rank.
        phase: The phase in which it is slow.
        late: Whether it was late, shape [steps].
        excess_ns: Median excess in these steps.
        chance: p-value of its lateness.
    """

    index: int
    phase: str
    late: Any
    excess_ns: float
    chance: float


def find_turns(joined: JoinedSteps, named: set[int]) -> list[Turn]:
    """Return ranks that are slow in different phases, or in every k-th step; at least two ranks, or none.

    Args:
        joined: The compared steps.
        named: Indices of ranks that are slow by themselves.
    """
    turns = _phase_turns(joined, named) or _periodic_turns(joined, named)
    return turns if len({turn.index for turn in turns}) >= 2 else []


def _phase_turns(joined: JoinedSteps, named: set[int]) -> list[Turn]:
    """Return ranks that exceed the others in one phase again and again, whatever they do in the other phases."""
    turns = []
    weights = step_weights(joined.window_ns)
    means_ns = joined.phases_ns.mean(axis=0)
    exceeding = means_ns - np.median(means_ns, axis=0) > _MIN_MEAN_SHARE * joined.step_ns.mean()
    if len(joined.ranks) == 2:
        exceeding = means_ns - means_ns.min(axis=0) > _MIN_MEAN_SHARE * joined.step_ns.mean()
    for number, phase in enumerate(wire.OWN_PHASES):
        if not exceeding[:, number].any():
            continue
        times_ns = joined.phases_ns[:, :, number]
        excess_ns = excesses(times_ns)
        late = is_late(excess_ns, joined.step_ns[:, None])
        suspects = _recurring(late, np.where(late, excess_ns, 0.0) * weights[:, None], weights * joined.window_ns)
        suspects = [index for index in suspects if index not in named]
        if not suspects:
            continue
        chances = chance_of(late)
        for index in suspects:
            if chances[index] <= _MAX_CHANCE:
                rows = late[:, index]
                turns.append(Turn(index, phase, rows, float(np.median(excess_ns[rows, index])), chances[index]))
    return turns


def _recurring(late: Any, cost_ns: Floats, time_ns: Floats) -> list[int]:
    """Return the ranks that stand out in each quarter of the steps, as in `recurrence.recurring_ranks`."""
    stand_out = np.ones(late.shape[1], bool)
    for rows in np.array_split(np.arange(len(late)), PARTS):
        shares = late[rows].mean(axis=0)
        stand_out &= (shares >= 0.5 * shares.max()) & (shares >= 2 * median_of_others(shares[None])[0])
        stand_out &= cost_ns[rows].sum(axis=0) >= MIN_COST_SHARE * max(1.0, float(time_ns[rows].sum()))
    return np.flatnonzero(stand_out).tolist()


def _periodic_turns(joined: JoinedSteps, named: set[int]) -> list[Turn]:
    """Return ranks of which each is late in its own steps of a period, such as even and odd steps."""
    late = lateness(joined)
    late_steps = late.late.sum(axis=0)
    for period in range(2, _MAX_PERIOD + 1):
        if len(joined) < _MIN_PERIOD_STEPS * period:
            break
        turns = [turn for residue in range(period) for turn in _turns_at(joined, late, late_steps, period, residue)]
        turns = [turn for turn in turns if turn.index not in named]
        if len({turn.index for turn in turns}) >= 2:
            return turns
    return []


def _turns_at(joined: JoinedSteps, late: Lateness, late_steps: wire.Ints, period: int, residue: int) -> list[Turn]:
    """Return the ranks that are late in these steps of a period; `late_steps` counts each rank's late steps of all."""
    is_turn = joined.step % period == residue
    rows = np.flatnonzero(is_turn)
    if not 0 < len(rows) < len(joined):
        return []
    parts = [late.late[part] for part in np.array_split(rows, PARTS)]
    counts = np.array([part.sum(axis=0) for part in parts])
    least = (counts / np.array([[max(1, len(part))] for part in parts])).min(axis=0)
    elsewhere = (late_steps - counts.sum(axis=0)) / (len(joined) - len(rows))
    often = (least >= _MIN_TURN_SHARE) & (elsewhere <= 0.5 * least)
    turns = []
    chances = chance_of(late.late[rows]) if often.any() else least
    for index in np.flatnonzero(often & (chances <= 2 * _MAX_CHANCE)).tolist():
        is_late = is_turn & late.late[:, index]
        phases = joined.phases_ns[is_late]
        excess = (phases[:, index] - np.median(np.delete(phases, index, axis=1), axis=1)).mean(axis=0)
        phase = wire.OWN_PHASES[int(excess.argmax())]
        turns.append(
            Turn(index, phase, is_late, float(np.median(late.excess_ns[is_late, index])), float(chances[index]))
        )
    return turns


def turn_losses_ns(joined: JoinedSteps, turns: list[Turn]) -> list[float]:
    """Return the time lost to each turn: the rank's share of the loss of the steps in which it was late."""
    weights = step_weights(joined.window_ns)
    shares = loss_shares(np.maximum(0.0, joined.own_ns - ideal_ns(joined)[:, None])) * weights[:, None]
    losses, counted = [], np.zeros(joined.own_ns.shape, bool)
    for turn in turns:
        rows = turn.late & ~counted[:, turn.index]
        counted[rows, turn.index] = True
        losses.append(float(shares[rows, turn.index].sum()))
    return losses
