"""How late each rank is in each step, and the cost of it.

Ranks are compared by their *own* times: the time from the end of a synchronisation to the rank's last gradient. All
ranks leave a synchronisation together, so own times need no common clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ddpobs import wire
from ddpobs.shared.delay import delays, excess_of, excesses, is_late
from ddpobs.whatif.repair import repaired_ns
from ddpobs_server.analysis.finding import Gain
from ddpobs_server.analysis.steps.joined_steps import Floats, JoinedSteps

BLOCK_STEPS = 4
"""Steps that are resampled or permuted together, so that noise in bursts stays in bursts."""
_MAX_WEIGHT_MEDIANS = 4.0
"""A step counts for at most this many median steps: a step with an upload is as long as thousands."""
_BULK_SHARE = 0.8
"""Share of a rank's cost, held by as few steps as possible, that defines its typical lateness. The rest is noise."""
_EXPLAINED_SHARE = 0.8
_RESAMPLINGS = 200


@dataclass(frozen=True)
class Lateness:
    """Lateness per step and rank.

    Attributes:
        excess_ns: Own time above the other ranks' median, shape [steps, ranks].
        delay_ns: The last rank's excess, shape [steps].
        last: Index of the last rank, shape [steps].
        late: Whether the excess is above `wire.STRAGGLER_SHARE` of the step, shape [steps, ranks].
    """

    excess_ns: Floats
    delay_ns: Floats
    last: wire.Ints
    late: npt.NDArray[np.bool_]

    @cached_property
    def cost_ns(self) -> Floats:
        """Time that a step loses to each late rank, if all others are in time; shape [steps, ranks]."""
        return np.where(self.late, self.excess_ns, 0.0)

    @cached_property
    def usual_excess_ns(self) -> Floats:
        """Median excess of each rank, shape [ranks]."""
        return np.asarray(np.median(self.excess_ns, axis=0))

    def latest(self, count: int) -> Lateness:
        """Return the last `count` steps."""
        if count >= len(self.last):
            return self
        return Lateness(self.excess_ns[-count:], self.delay_ns[-count:], self.last[-count:], self.late[-count:])


def lateness(joined: JoinedSteps) -> Lateness:
    """Compute excess, delay and the last rank of each step; needs at least two ranks."""
    excess_ns = excesses(joined.own_ns)
    last, delay_ns = delays(joined.own_ns, excess_ns)
    return Lateness(excess_ns, delay_ns, last, is_late(excess_ns, joined.step_ns[:, None]))


def step_weights(window_ns: Floats) -> Floats:
    """Weigh steps so that no step counts for more than `_MAX_WEIGHT_MEDIANS` median steps.

    The median is over the steps that took any time: the next step's own time may account for a whole window.

    Returns:
        Shape [steps], above 0 and at most 1.
    """
    positive_ns = window_ns[window_ns > 0]
    if not len(positive_ns):
        return np.ones_like(window_ns)
    most_ns = _MAX_WEIGHT_MEDIANS * np.median(positive_ns)
    return np.asarray(most_ns / np.maximum(most_ns, window_ns))


def cost_shares(joined: JoinedSteps, late: Lateness, rows: wire.Ints) -> Floats:
    """Return the share of these steps' time that is lost to each rank; shape [ranks], each from 0 to 1."""
    window_ns = joined.window_ns[rows]
    weights = step_weights(window_ns)
    return np.asarray(weights @ late.cost_ns[rows] / max(1.0, float(weights @ window_ns)))


def typical_lateness(joined: JoinedSteps, late: Lateness, index: int) -> Lateness:
    """Restrict a rank's late steps to those of typical excess.

    The fewest steps that hold `_BULK_SHARE` of the rank's cost are typical. The rank stays late in each step with at
    least half of their median excess.

    Args:
        joined: The compared steps.
        late: Lateness of these steps.
        index: Index of the rank.
    """
    cost_ns = step_weights(joined.window_ns) * late.cost_ns[:, index]
    order = np.argsort(-cost_ns, kind="stable")
    count = int(np.searchsorted(np.cumsum(cost_ns[order]), _BULK_SHARE * cost_ns.sum())) + 1
    excess_ns = late.excess_ns[:, index]
    is_late = late.late.copy()
    is_late[:, index] &= excess_ns >= 0.5 * np.median(excess_ns[order[:count]])
    return replace(late, late=is_late)


def steady_lateness(late: Lateness, level_ns: float) -> Lateness:
    """Count ranks as late in each step with at least half of the usual excess of a rank that is slow in every step."""
    return replace(late, late=late.excess_ns >= 0.5 * level_ns)


def slow_phases(joined: JoinedSteps, index: int, rows: wire.Ints, *, usual: bool = False) -> dict[str, float]:
    """Return the phases that explain most of a rank's excess in these steps; see `largest_phases`.

    Args:
        joined: The compared steps.
        index: Index of the rank.
        rows: Indices of the steps in which the rank was late.
        usual: Take the median over these steps, if it explains half of the excess: rare noise does not change it.

    Returns:
        Mean or median excess in ns, by phase.
    """
    # One phase after another: a copy of all phases of a thousand ranks would be the largest of a diagnosis.
    excesses_ns = np.stack([excess_of(of_phase[rows], index) for of_phase in np.moveaxis(joined.phases_ns, -1, 0)])
    excess_ns, medians_ns = excesses_ns.mean(axis=1), np.median(excesses_ns, axis=1)
    if usual and medians_ns[medians_ns > 0].sum() >= 0.5 * excess_ns[excess_ns > 0].sum():
        excess_ns = medians_ns
    return largest_phases(excess_ns)


def largest_phases(excess_ns: Floats) -> dict[str, float]:
    """Return the phases that explain `_EXPLAINED_SHARE` of an excess, the largest first.

    Args:
        excess_ns: Excess by phase, shape [phases].
    """
    total_ns = max(1.0, float(excess_ns[excess_ns > 0].sum()))
    explained: dict[str, float] = {}
    for phase in np.argsort(-excess_ns).tolist():
        if excess_ns[phase] <= 0 or sum(explained.values()) >= _EXPLAINED_SHARE * total_ns:
            break
        explained[wire.OWN_PHASES[phase]] = float(excess_ns[phase])
    return explained


def gain(joined: JoinedSteps, index: int) -> Gain:
    """Predict the saving per step if this rank were as fast as the others' median.

    If the rank was last in a step, the step then waits for the next to last rank. Steps count by `step_weights`.
    The error is the standard deviation over resampled blocks of steps.

    Source: T - T_ideal of S = T / T_ideal (arXiv 2505.05713), with only this rank brought to the others' median.
    """
    return mean_gain(joined, repaired_ns(joined.own_ns[:, :, None], index))


def mean_gain(joined: JoinedSteps, saved_ns: Floats) -> Gain:
    """Return the mean saving per step, with the standard deviation over resampled blocks of steps.

    Args:
        joined: The compared steps, which count by `step_weights`.
        saved_ns: Time that each step would save, shape [steps].
    """
    weights = step_weights(joined.window_ns)
    saved = weights * saved_ns
    blocks = max(1, len(saved) // BLOCK_STEPS)
    means = saved[: blocks * BLOCK_STEPS].reshape(blocks, -1).mean(axis=1)
    resampled = np.random.default_rng(0).choice(means, (_RESAMPLINGS, blocks)).mean(axis=1)
    step_ns = float(saved.mean())
    return Gain(
        step_ns=round(step_ns),
        ratio=round(step_ns / float((weights * joined.window_ns).mean()), 4),
        error_ratio=round(float(resampled.std()) / step_ns, 4) if step_ns else 0.0,
    )


def lateness_table(joined: JoinedSteps) -> dict[str, Any]:
    """Return excess, delay and last rank by step, and a summary per rank, in the form of the REST API.

    `excess_ns` is an array of shape [steps, ranks], `per_rank` an iterator.
    """
    late = lateness(joined)
    return {
        "excess_ns": late.excess_ns.astype(np.int64),
        "delay_ns": late.delay_ns.astype(np.int64).tolist(),
        "last_rank": joined.ranks[late.last].tolist(),
        "per_rank": _rank_summaries(joined, late),
    }


def _rank_summaries(joined: JoinedSteps, late: Lateness) -> Iterator[dict[str, Any]]:
    medians = np.median(joined.phases_ns, axis=0)
    excess = excesses(medians[None])[0]
    own = joined.usual_own_ns
    late_share = late.late.mean(axis=0)
    last_share = np.bincount(late.last, minlength=len(joined.ranks)) / len(joined)
    delay = np.bincount(late.last, late.delay_ns, len(joined.ranks)) / len(joined)
    for index, rank in enumerate(joined.ranks.tolist()):
        yield {
            "rank": rank,
            "last_share": round(float(last_share[index]), 4),
            "late_share": round(float(late_share[index]), 4),
            "delay_ns": round(float(delay[index])),
            "own_ns": round(float(own[index])),
            "excess_ns": dict(zip(wire.OWN_PHASES, map(round, excess[index].tolist()), strict=True)),
        }
