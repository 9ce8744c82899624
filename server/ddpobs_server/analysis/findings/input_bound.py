"""Finding `input-bound`: training waits for the next batch."""

from __future__ import annotations

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.evidence import MIN_STEPS, Evidence, Judgement
from ddpobs_server.analysis.finding import Finding, NotJudged, severity_of
from ddpobs_server.analysis.joined_steps import Floats, ranks_of

DATA_SHARE = 0.3


_FIFTHS = 5


def input_bound(evidence: Evidence) -> Judgement:
    """The data phase is the largest, and above 30 % of the time, on the median rank and in most of the run."""
    steps = evidence.steps
    if len(np.unique(steps.step)) < MIN_STEPS:
        return NotJudged("input-bound", f"fewer than {MIN_STEPS} steps")
    shares = _phase_shares(evidence.rank, steps)
    # The lower median: of two ranks both must be held up, else it is one rank's trouble and a straggler's.
    middle = shares[np.argsort(shares[:, 0])[(len(shares) - 1) // 2]]
    if middle[0] <= DATA_SHARE or middle.argmax() != 0:
        return []
    return [
        Finding(
            code="input-bound",
            severity=severity_of(float(middle[0])),
            title=f"{middle[0]:.0%} of the time is spent waiting for data",
            remedy="Give the loader more workers (num_workers, prefetch_factor), or make samples cheaper to prepare.",
            steps=evidence.seen,
            phase="data",
            evidence={"shares": {p: round(float(s), 4) for p, s in zip(wire.PHASES, middle, strict=True)}},
        )
    ]


def _phase_shares(rank: wire.Ints, steps: wire.Steps) -> Floats:
    """What share of the time each phase takes on each rank: the median over fifths of its steps.

    One slow fetch, as the first is, changes one fifth; workers that deliver in bursts, whose median step waits for
    nothing, count in all of them.

    Returns:
        Shape [ranks, phases].
    """
    ranks, place = ranks_of(rank)
    counts = np.bincount(place, minlength=len(ranks))
    order = np.argsort(place, kind="stable")
    number = np.arange(len(rank)) - np.repeat(np.cumsum(counts) - counts, counts)
    part = place[order] * _FIFTHS + number * _FIFTHS // counts[place[order]]
    times = [getattr(steps, f"{phase}_ns")[order] for phase in wire.PHASES]
    sums = np.stack([np.bincount(part, ns, len(ranks) * _FIFTHS) for ns in times], axis=1)
    shares = sums / np.maximum(1.0, sums.sum(axis=1, keepdims=True))
    return np.asarray(np.median(shares.reshape(len(ranks), _FIFTHS, -1), axis=1))
