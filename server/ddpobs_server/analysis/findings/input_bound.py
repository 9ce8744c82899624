"""Finding `input-bound`: training waits for the next batch."""

from __future__ import annotations

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.evidence import MIN_STEPS, Evidence, Judgement
from ddpobs_server.analysis.finding import Finding, NotJudged, severity_of
from ddpobs_server.analysis.joined_steps import Floats, index_ranks

CODES = ("input-bound",)
DATA_SHARE = 0.3
"""Largest share of the data phase that is no finding."""
_PARTS = 5


def input_bound(evidence: Evidence) -> Judgement:
    """Judge a data phase that is the largest phase and above 30 % of the time, on the lower median rank."""
    if len(np.unique(evidence.steps.step)) < MIN_STEPS:
        return [NotJudged("input-bound", f"fewer than {MIN_STEPS} steps")]
    shares = _phase_shares(evidence.rank, evidence.steps)
    # Of two ranks both must wait for data: a single waiting rank is a straggler.
    lower_median = shares[np.argsort(shares[:, 0])[(len(shares) - 1) // 2]]
    if lower_median[0] <= DATA_SHARE or lower_median.argmax() != 0:
        return []
    return [
        Finding(
            code="input-bound",
            severity=severity_of(float(lower_median[0])),
            title=f"{lower_median[0]:.0%} of the time is spent waiting for data",
            remedy="Give the loader more workers (num_workers, prefetch_factor), or make samples cheaper to prepare.",
            steps=evidence.step_range,
            phase="data",
            evidence={"shares": {p: round(float(s), 4) for p, s in zip(wire.PHASES, lower_median, strict=True)}},
        )
    ]


def _phase_shares(rank: wire.Ints, steps: wire.Steps) -> Floats:
    """Return the share of each phase in each rank's time: the median over fifths of the rank's steps.

    One slow fetch, such as the first, changes only one fifth. Workers that deliver in bursts count in all
    fifths, although the median step does not wait.

    Returns:
        Shape [ranks, phases].
    """
    ranks, index = index_ranks(rank)
    counts = np.bincount(index, minlength=len(ranks))
    order = np.argsort(index, kind="stable")
    number = np.arange(len(rank)) - np.repeat(np.cumsum(counts) - counts, counts)
    part = index[order] * _PARTS + number * _PARTS // counts[index[order]]
    times = [getattr(steps, f"{phase}_ns")[order] for phase in wire.PHASES]
    sums = np.stack([np.bincount(part, ns, len(ranks) * _PARTS) for ns in times], axis=1)
    shares = sums / np.maximum(1.0, sums.sum(axis=1, keepdims=True))
    return np.asarray(np.median(shares.reshape(len(ranks), _PARTS, -1), axis=1))
