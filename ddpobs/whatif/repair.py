"""Slow ranks repaired: what steps would take if ranks worked like the others' median.

Source: S = T / T_ideal, and S_r with only rank r left slow (arXiv 2505.05713).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddpobs.whatif.link import Floats


def repaired_ns(own_ns: Floats, rank: int, phase: int | None = None) -> Floats:
    """Return what each step saves if a rank works like the median of the others.

    A step waits for the rank with the longest own time, the sum of its phases.

    Args:
        own_ns: Own time of each rank by phase, shape [steps, ranks, phases].
        rank: Index of the rank.
        phase: Index of the only phase that changes, by half of its excess; None for all of them, wholly.

    Returns:
        Shape [steps]; never negative.
    """
    usual, own = np.median(np.delete(own_ns, rank, axis=1), axis=1), own_ns[:, rank]
    if phase is None:
        repaired = np.minimum(own, usual)
    else:
        repaired = own.copy()
        repaired[:, phase] -= np.maximum(0.0, own[:, phase] - usual[:, phase]) / 2
    times_ns = own_ns.sum(axis=2)
    others_ns = np.delete(times_ns, rank, axis=1).max(axis=1, initial=-np.inf)
    return np.asarray(times_ns.max(axis=1) - np.maximum(others_ns, repaired.sum(axis=1)))


def shared_work_ns(own_ns: Floats, extra_ns: Floats) -> Floats:
    """Return what each step saves if the ranks share its work equally.

    The last rank then arrives as early as its machine allows.

    Args:
        own_ns: Own time of each rank, shape [steps, ranks].
        extra_ns: Its part that is due to more work than the ranks' mean, same shape; negative for less.

    Returns:
        Shape [steps]; never negative.
    """
    return np.asarray(np.maximum(0.0, own_ns.max(axis=1) - (own_ns - extra_ns).max(axis=1)))


@dataclass(frozen=True)
class Slowdown:
    """What slow ranks cost.

    Attributes:
        total: S = T / T_ideal, where T_ideal has every rank as fast as the median rank in each phase.
        by_rank: S_r, with only rank r as slow as it is, shape [ranks].
        by_phase: The same with only one phase as slow as it is, on all ranks, shape [phases].
    """

    total: float
    by_rank: Floats
    by_phase: Floats

    @property
    def lost_share(self) -> float:
        """Share of the ranks' time that slow ranks cost: 1 - 1 / S."""
        return 1 - 1 / self.total


def slowdown(step_ns: Floats, own_ns: Floats) -> Slowdown:
    """Return S = T / T_ideal (arXiv 2505.05713) of data-parallel steps, which wait for the longest own time.

    Args:
        step_ns: Time of each step, shape [steps].
        own_ns: Own time of each rank by phase, shape [steps, ranks, phases].
    """
    usual_ns = np.median(own_ns, axis=1)
    ideal_ns, last_ns = usual_ns.sum(axis=1), own_ns.sum(axis=2).max(axis=1)
    rest_ns = float((step_ns - last_ns).sum())
    ideal = rest_ns + float(np.minimum(ideal_ns, last_ns).sum())
    with_rank = np.maximum(own_ns.sum(axis=2), ideal_ns[:, None])
    with_phase = ideal_ns[:, None] + np.maximum(0.0, own_ns.max(axis=1) - usual_ns)
    return Slowdown(
        total=float(step_ns.sum()) / ideal,
        by_rank=(rest_ns + np.minimum(with_rank, last_ns[:, None]).sum(axis=0)) / ideal,
        by_phase=(rest_ns + np.minimum(with_phase, last_ns[:, None]).sum(axis=0)) / ideal,
    )
