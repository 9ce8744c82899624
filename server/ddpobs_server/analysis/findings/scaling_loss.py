"""Finding `scaling-loss`: the ranks together do much less than as many ranks without communication would.

It sums up losses that other findings explain, so it is always `info`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddpobs.shared.words import percent
from ddpobs_server.analysis.account.work import Work, work_of, work_of_steps
from ddpobs_server.analysis.evidence import MIN_STEPS, Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding, NotJudged

CODES = ("scaling-loss",)
EFFICIENCY = 0.8
"""Minimum efficiency that is no finding."""


@dataclass(frozen=True)
class ScalingLossFacts(Facts):
    """Mean times of a step, over all ranks: in the whole run, or in the selected steps.

    Attributes:
        efficiency: Share of the steps' time without waiting and moving.
        slowdown: One over the efficiency; null if it is 0.
        step_ns: Mean step.
        ideal_step_ns: The step without waiting and moving.
        waiting_ns: Part in which a rank waits for other ranks.
        moving_ns: Part in which data moves and backward does not hide it.
        rank_seconds_lost: Time lost by all ranks together, in seconds.
        steps_used: Number of steps.
    """

    efficiency: float
    slowdown: float | None
    step_ns: int
    ideal_step_ns: int
    waiting_ns: int
    moving_ns: int
    rank_seconds_lost: float
    steps_used: int


FACTS = (ScalingLossFacts,)


def scaling_loss(evidence: Evidence) -> Judgement:
    """Judge the share of the steps' time without waiting and moving: of the whole run, as in its account.

    If a part of the run is judged, it is the share in these steps.
    """
    joined = evidence.joined
    if len(joined.ranks) < 2 and not evidence.absent_ranks:
        return []
    if evidence.separate_groups_reason:
        return [NotJudged("scaling-loss", evidence.separate_groups_reason)]
    if evidence.absent_ranks:
        return [NotJudged("scaling-loss", "needs the telemetry of all ranks")]
    if len(joined) < MIN_STEPS:
        return [NotJudged("scaling-loss", f"fewer than {MIN_STEPS} steps in which all ranks can be compared")]
    work = work_of(evidence.account) if evidence.account and evidence.account.parts else work_of_steps(joined)
    return [] if work.efficiency >= EFFICIENCY else [_finding(evidence, work)]


def _finding(evidence: Evidence, work: Work) -> Finding:
    of_step = max(1, work.ranks * work.steps)
    return Finding(
        code="scaling-loss",
        severity="info",
        verdict=work.verdict,
        measure=f"{percent(1 - work.efficiency)} of the steps' time is lost",
        cause=work.losses,
        remedy="See the findings about communication and stragglers: they name the causes of these shares.",
        steps=evidence.step_range,
        phase="exposed_comm",
        evidence=ScalingLossFacts(
            efficiency=round(work.efficiency, 4),
            slowdown=round(1 / work.efficiency, 4) if work.efficiency else None,
            step_ns=round(work.steps_ns / of_step),
            ideal_step_ns=round(work.steps_ns * work.efficiency / of_step),
            waiting_ns=round(work.waiting_ns / of_step),
            moving_ns=round(work.moving_ns / of_step),
            rank_seconds_lost=round((work.waiting_ns + work.moving_ns) / 1e9, 1),
            steps_used=work.steps,
        ),
    )
