"""Finding `scaling-loss`: the ranks together do much less than as many ranks without communication would.

It sums up losses that other findings explain, so it is always `info`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddpobs import wire
from ddpobs.shared.words import percent
from ddpobs_server.analysis.evidence import MIN_STEPS, Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding, NotJudged
from ddpobs_server.analysis.slow_ranks.lateness import step_weights
from ddpobs_server.analysis.steps.joined_steps import Floats, JoinedSteps

CODES = ("scaling-loss",)
EFFICIENCY = 0.8
"""Minimum efficiency that is no finding."""


@dataclass(frozen=True)
class ScalingLossFacts(Facts):
    """Mean times from one synchronisation to the next.

    Attributes:
        efficiency: Ideal step over the measured one.
        slowdown: Measured step over the ideal one.
        step_ns: Mean step.
        ideal_step_ns: Step without communication and uneven ranks.
        waiting_ns: Part that is waiting for other ranks.
        moving_ns: Part that is communication.
        rank_seconds_lost: Time lost by all ranks together, in seconds.
        steps_used: Number of steps.
    """

    efficiency: float
    slowdown: float
    step_ns: int
    ideal_step_ns: int
    waiting_ns: int
    moving_ns: int
    rank_seconds_lost: float
    steps_used: int


FACTS = (ScalingLossFacts,)


def scaling_loss(evidence: Evidence) -> Judgement:
    """Judge the ratio of a step without communication and without uneven ranks to the steps that were measured.

    Source: S = T / T_ideal, where T_ideal replaces the ranks' phase times by the median rank's (arXiv 2505.05713).
    """
    joined = evidence.joined
    if len(joined.ranks) < 2 and not evidence.absent_ranks:
        return []
    if evidence.separate_groups_reason:
        return [NotJudged("scaling-loss", evidence.separate_groups_reason)]
    # A step without a successor may end with a wait for a checkpoint or an evaluation.
    rows = np.flatnonzero(joined.has_successor)
    if evidence.absent_ranks or len(rows) < MIN_STEPS - 1:
        return [NotJudged("scaling-loss", _unknown(evidence))]
    total_ns, ideal_ns, waiting_ns = _mean_times_ns(joined, rows)
    efficiency = ideal_ns / total_ns
    return [] if efficiency >= EFFICIENCY else [_finding(evidence, (total_ns, ideal_ns, waiting_ns))]


def _unknown(evidence: Evidence) -> str:
    if evidence.absent_ranks:
        return "needs the telemetry of all ranks"
    return f"fewer than {MIN_STEPS} steps in a row in which all ranks can be compared"


def _mean_times_ns(joined: JoinedSteps, rows: wire.Ints) -> tuple[float, float, float]:
    """Return the mean step, the mean ideal step, and the mean wait for the last rank; each weighted by step."""
    window_ns = joined.window_ns[rows]
    weights = step_weights(window_ns)
    ideal_ns = np.minimum(np.median(joined.phases_ns[rows], axis=1).sum(axis=1), window_ns)
    # The last rank to arrive waits for none, so the least exposed time holds no waiting.
    moving_ns = np.minimum(joined.exposed_ns[rows].min(axis=1), window_ns - ideal_ns)
    waiting_ns = window_ns - ideal_ns - moving_ns

    def mean(times_ns: Floats) -> float:
        return float(np.average(times_ns, weights=weights))

    return max(1.0, mean(window_ns)), mean(ideal_ns), max(0.0, mean(waiting_ns))


def _finding(evidence: Evidence, times_ns: tuple[float, float, float]) -> Finding:
    total_ns, ideal_ns, waiting_ns = times_ns
    ranks, efficiency = len(evidence.joined.ranks), ideal_ns / total_ns
    waiting = waiting_ns / total_ns
    moving = max(0.0, 1 - efficiency - waiting)
    return Finding(
        code="scaling-loss",
        severity="info",
        verdict=f"{ranks} ranks do the work of {ranks * efficiency:.1f}",
        measure=f"{percent(efficiency)} of the time from step to step is computation",
        cause=f"{percent(waiting)} of it is waiting for other ranks, {percent(moving)} communication",
        remedy="See the findings about communication and stragglers: they name the causes of these shares.",
        steps=evidence.step_range,
        phase="exposed_comm",
        evidence=ScalingLossFacts(
            efficiency=round(efficiency, 4),
            slowdown=round(total_ns / max(1.0, ideal_ns), 4),
            step_ns=round(total_ns),
            ideal_step_ns=round(ideal_ns),
            waiting_ns=round(waiting_ns),
            moving_ns=round(max(0.0, total_ns - ideal_ns - waiting_ns)),
            rank_seconds_lost=round((1 - efficiency) * ranks * float(evidence.joined.window_ns.sum()) / 1e9, 1),
            steps_used=int(evidence.joined.has_successor.sum()),
        ),
    )
