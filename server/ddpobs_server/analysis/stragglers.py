"""Which rank is late by its own doing, in which phase, and whether that is more than chance.

Compares *own* times: what a rank spent between the end of one synchronisation and its last gradient's readiness. All
ranks leave a synchronisation together, so these are comparable over ranks with no common clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddpobs import wire
from ddpobs_server.analysis.findings import Finding, Gain, Missing, severity_of
from ddpobs_server.analysis.joins import Floats, Joined, median_of_others

MIN_STEPS = 32
ALARM_SHARE = 0.1
"""A rank is late in a step when it exceeds the others' median by this share of the step."""
MIN_COST_SHARE = 0.05
"""What a rank must cost on average, as a share of the step, to be worth a finding."""
CHANCE = 0.01
RECENT_STEPS = 1024
"""What is judged: who was slow long ago is not slow now."""
_BLOCK = 4
_PARTS = 4
_PERMUTATIONS = 400
_EXPLAINED = 0.8


@dataclass(frozen=True)
class Lateness:
    """Per step and rank, from `Joined`.

    Attributes:
        excess_ns: Own time above the other ranks' median, shape [steps, ranks].
        delay_ns: The last rank's excess, shape [steps].
        last: Index of the last rank, shape [steps].
        late: Excess above `ALARM_SHARE` of the step, shape [steps, ranks].
    """

    excess_ns: Floats
    delay_ns: Floats
    last: wire.Ints
    late: npt.NDArray[np.bool_]


def lateness(joined: Joined) -> Lateness:
    """Excess, delay and who was last; needs two ranks."""
    excess = joined.own_ns - median_of_others(joined.own_ns)
    last = joined.own_ns.argmax(axis=1)
    delay = excess[np.arange(len(joined)), last]
    return Lateness(excess, delay, last, excess > ALARM_SHARE * joined.step_ns[:, None])


def chance_of(late: npt.NDArray[np.bool_], seed: int = 0) -> Floats:
    """How often chance alone would make some rank late as often as each rank was.

    Ranks are permuted anew in each block of steps, so that what comes in bursts stays in bursts.

    Args:
        late: Shape [steps, ranks].
        seed: Of the permutations; the same run always gets the same answer.

    Returns:
        Shape [ranks], a p-value with the usual +1 correction.
    """
    steps, ranks = late.shape
    blocks = steps // _BLOCK
    counts = late[: blocks * _BLOCK].reshape(blocks, _BLOCK, ranks).sum(axis=1)
    observed = counts.sum(axis=0)
    random = np.random.default_rng(seed)
    repeated = np.broadcast_to(counts, (_PERMUTATIONS, blocks, ranks))
    most = random.permuted(repeated, axis=2).sum(axis=1).max(axis=1)
    return np.asarray((1 + (most[:, None] >= observed).sum(axis=0)) / (1 + _PERMUTATIONS))


def recurs(joined: Joined, late: Lateness, index: int) -> bool:
    """Whether a rank stands out in each quarter of the steps, not in one burst of noise.

    In each it is late at least half as often as the one that is late most, at least twice as often as the others'
    median, and costs `MIN_COST_SHARE`.
    """
    for rows in np.array_split(np.arange(len(joined)), _PARTS):
        shares = late.late[rows].mean(axis=0)
        costs = np.where(late.late[rows, index], late.excess_ns[rows, index], 0.0)
        stands_out = shares[index] >= 0.5 * shares.max() and shares[index] >= 2 * np.median(np.delete(shares, index))
        if not stands_out or costs.mean() < MIN_COST_SHARE * joined.step_ns[rows].mean():
            return False
    return True


def causes(joined: Joined, rank: int, rows: wire.Ints) -> list[tuple[str, float]]:
    """Phases that explain at least 80 % of a rank's excess in these steps, the dominant one first.

    Args:
        joined: The run.
        rank: Index of the rank.
        rows: Indices of the steps in which it was late.

    Returns:
        (phase, mean excess in ns).
    """
    phases = joined.phases_ns[rows]
    excess = (phases - median_of_others(phases))[:, rank].mean(axis=0)
    total = max(1.0, float(excess[excess > 0].sum()))
    named: list[tuple[str, float]] = []
    for index in np.argsort(-excess):
        if excess[index] <= 0 or sum(ns for _, ns in named) >= _EXPLAINED * total:
            break
        named.append((wire.OWN_PHASES[index], float(excess[index])))
    return named


def first_late_bucket(
    rank: int, row_rank: wire.Ints, spans: wire.Spans, began_ns: dict[tuple[int, int], int]
) -> int | None:
    """The bucket at which a slow backward shows: at least half of the whole lag arises there, not evenly over all.

    Args:
        rank: The slow rank.
        row_rank: Rank of each span.
        spans: Of one module and layout revision.
        began_ns: When backward began, by (step, rank), on that rank's clock.

    Returns:
        The bucket's index, or None where the ranks' buckets do not compare.
    """
    began = np.array([began_ns.get((s, r), -1) for s, r in zip(spans.step.tolist(), row_rank.tolist(), strict=True)])
    known = began >= 0
    since = spans.ready_ns - began
    buckets = np.unique(spans.bucket)
    lags = []
    for bucket in buckets:
        of_bucket = known & (spans.bucket == bucket)
        mine, others = since[of_bucket & (row_rank == rank)], since[of_bucket & (row_rank != rank)]
        if not len(mine) or not len(others):
            return None
        lags.append(float(np.median(mine) - np.median(others)))
    if not lags or max(lags) <= 0:
        return None
    growth = np.diff(lags, prepend=0.0)
    return int(buckets[growth.argmax()]) if growth.max() >= 0.5 * max(lags) else None


def gain(joined: Joined, late: Lateness, rank: int) -> Gain:
    """What a step would save were this rank as fast as the others' median.

    T - T_ideal of S = T / T_ideal (arXiv 2505.05713) with this one rank brought to the others' median: where it was
    last, the step then waits for the next to last. The error is the standard deviation over resampled blocks of steps.
    """
    next_to_last = np.sort(joined.own_ns, axis=1)[:, -2]
    saved = np.where(late.last == rank, joined.own_ns.max(axis=1) - next_to_last, 0.0)
    blocks = max(1, len(saved) // _BLOCK)
    means = saved[: blocks * _BLOCK].reshape(blocks, -1).mean(axis=1)
    resampled = np.random.default_rng(0).choice(means, (200, blocks)).mean(axis=1)
    step_ns = float(saved.mean())
    return Gain(
        step_ns=round(step_ns),
        ratio=round(step_ns / float(joined.step_ns.mean()), 4),
        error_ratio=round(float(resampled.std()) / step_ns, 4) if step_ns else 0.0,
    )


def straggler_findings(joined: Joined, hosts: dict[int, str]) -> list[Finding] | Missing:
    """A finding for each rank that is late more often than chance, and that costs enough to matter."""
    if len(joined.ranks) < 2:
        return Missing("straggler", "needs at least two ranks")
    if len(joined) < MIN_STEPS:
        return Missing("straggler", f"{len(joined)} of {MIN_STEPS} steps in which every rank's own time is known")
    joined = joined.latest(RECENT_STEPS)
    late = lateness(joined)
    chance = chance_of(late.late)
    return [
        _finding(joined, late, index, rank, float(chance[index]), hosts)
        for index, rank in enumerate(joined.ranks.tolist())
        if chance[index] <= CHANCE and recurs(joined, late, index)
    ]


def _finding(  # noqa: PLR0917 - the facts of one rank
    joined: Joined, late: Lateness, index: int, rank: int, chance: float, hosts: dict[int, str]
) -> Finding:
    rows = np.flatnonzero(late.late[:, index])
    named = causes(joined, index, rows)
    phase = named[0][0] if named else "other"
    share = len(rows) / len(joined)
    excess_ns = float(np.median(late.excess_ns[rows, index]))
    step_ns = float(joined.step_ns.mean())
    saved = gain(joined, late, index)
    kind = "persistent" if share >= 0.6 else "intermittent"
    when = "in every step" if share > 0.98 else f"in {share:.0%} of the steps"
    return Finding(
        code="straggler",
        severity=severity_of(saved.ratio),
        title=(
            f"Rank {rank} is slow in {phase}: {excess_ns / 1e6:.1f} ms more than the other ranks {when}, "
            f"of a step of {step_ns / 1e6:.1f} ms"
        ),
        remedy=_REMEDIES[phase],
        steps=(int(joined.step[0]), int(joined.step[-1])),
        ranks=[rank],
        phase=phase,
        evidence={
            "kind": kind,
            "host": hosts.get(rank),
            "late_share": round(share, 4),
            "chance": round(chance, 4),
            "excess_ns": round(excess_ns),
            "step_ns": round(step_ns),
            "phase_excess_ns": {name: round(ns) for name, ns in named},
            "own_ns": {str(r): round(float(ns)) for r, ns in _medians(joined)},
            "steps_used": len(joined),
        },
        gain=saved,
    )


def _medians(joined: Joined) -> list[tuple[int, float]]:
    return list(zip(joined.ranks.tolist(), np.median(joined.own_ns, axis=0).tolist(), strict=True))


_REMEDIES = {
    "data": "Look at this rank's input: its storage, its loader workers, the sizes of its samples.",
    "forward": "Look for longer inputs on this rank, other processes on its host, a slower device.",
    "backward": "Look for longer inputs on this rank, other processes on its host, a slower device.",
    "optimizer": "Look at what this rank alone does after backward: clipping, logging, an optimizer of its own.",
    "other": "Look at what this rank does between the phases: logging, metrics, checks.",
}
