"""Slow ranks repaired: what steps would take if ranks worked like the others' median.

Source: S = T / T_ideal, and S_r with only rank r left slow (arXiv 2505.05713).
"""

from __future__ import annotations

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
    usual = np.median(np.delete(own_ns, rank, axis=1), axis=1)
    repaired = own_ns.copy()
    if phase is None:
        repaired[:, rank] = np.minimum(repaired[:, rank], usual)
    else:
        excess_ns = np.maximum(0.0, own_ns[:, rank, phase] - usual[:, phase])
        repaired[:, rank, phase] -= excess_ns / 2
    return np.asarray(own_ns.sum(axis=2).max(axis=1) - repaired.sum(axis=2).max(axis=1))


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
