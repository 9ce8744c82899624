"""Finding `imbalanced-batches`: a rank is late because of its samples, not of its machine.

Own time is split into work and machine in `work.py`. The finding `straggler` judges the machine's part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ddpobs import wire
from ddpobs.shared.delay import excesses
from ddpobs.shared.quantities import duration
from ddpobs.shared.words import percent
from ddpobs.whatif.repair import shared_work_ns
from ddpobs_server.analysis.evidence import Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding, Gain, NotJudged, how_often, severity_of
from ddpobs_server.analysis.findings.straggler import (
    MIN_COMPARED_STEPS,
    RECENT_STEPS,
    slow_by_constant_batches,
    uneven_batches,
)
from ddpobs_server.analysis.slow_ranks.chance import beyond_chance
from ddpobs_server.analysis.slow_ranks.lateness import Lateness, cost_shares, lateness, mean_gain, typical_lateness
from ddpobs_server.analysis.slow_ranks.recurrence import costly_ranks, recurring_ranks
from ddpobs_server.analysis.slow_ranks.slow_rank import SlowRank
from ddpobs_server.analysis.slow_ranks.work import ConstantWork, WorkFit, at_equal_machines
from ddpobs_server.analysis.steps.joined_steps import JoinedSteps

CODES = ("imbalanced-batches",)
_MIN_GAIN = 0.05
"""Minimum share of the steps that equal batches would save, if no rank's batches are always larger."""
_REMEDY = (
    "Give each rank batches of the same work in each step: sort samples by length into buckets and let each rank draw "
    "from the same bucket (a length-grouped sampler), or fill batches up to a number of elements instead of rows."
)
_CONSTANT_REMEDY = (
    "Give each rank as many samples: divide the batch by the number of ranks, with the same batch_size on each. If one "
    "is to have more, because its device is faster, give it fewer."
)


@dataclass(frozen=True)
class ImbalancedBatchesFacts(Facts):
    """The line of own time over work, and of each rank its work; the rank's own figures are None if none is late.

    Attributes:
        measure: Measure of work.
        ns_per_unit: Own time per unit of it.
        work: Median work by rank.
        machine_excess_ns: Excess of each rank's median own time at equal work; None if each rank's batches always have
            one size, so that it cannot be told.
        steps_used: Number of steps.
        step_ns: Median step.
        excess_ns: Median delay of the rank in the steps in which it is late; None if no rank is late.
        late_share: Share of these steps; None if no rank is late.
        lost_share: Share of the steps' time that the rank costs; None if no rank is late.
        chance: Probability of so many late steps by chance; None if no rank is late.
    """

    measure: str
    ns_per_unit: float
    work: dict[str, float]
    machine_excess_ns: dict[str, int] | None
    steps_used: int
    step_ns: int
    excess_ns: int | None = None
    late_share: float | None = None
    lost_share: float | None = None
    chance: float | None = None


FACTS = (ImbalancedBatchesFacts,)


def imbalanced_batches(evidence: Evidence) -> Judgement:
    """Return a finding for each rank with larger batches, or one without a rank if batches are uneven by chance."""
    joined = evidence.joined.latest(RECENT_STEPS)
    if evidence.separate_groups_reason or len(joined.ranks) < 2 or len(joined) < MIN_COMPARED_STEPS:
        return []  # The finding `straggler` needs the same, and reports the reason.
    if evidence.work_fit is None:
        if by_batches := slow_by_constant_batches(evidence):
            return [_of_constant_batches(slow, constant, evidence) for slow, constant in by_batches]
        if uneven_batches(evidence) is not None:
            reason = "each rank's batches are always of one size, so that their work cannot be told from its machine"
            return [NotJudged("imbalanced-batches", reason)]
        return []
    fit = evidence.work_fit.latest(RECENT_STEPS)
    by_work = at_equal_machines(joined, fit)
    late = lateness(by_work)
    gain = _bucketing_gain(joined, fit)
    shared: dict[str, Any] = {"fit": fit, "gain": gain, "facts": _fit_facts(joined, fit), "evidence": evidence}
    chances = beyond_chance(late.late, recurring_ranks(by_work, late), late.excess_ns)
    findings = [_finding(by_work, late, index, chance, **shared) for index, chance in chances.items()]
    for index, chance in beyond_chance(
        late.cost_ns, sorted({*costly_ranks(by_work, late)} - {*chances}), late.excess_ns
    ).items():
        findings.append(_finding(by_work, typical_lateness(by_work, late, index), index, chance, **shared))
    if not findings and gain.ratio >= _MIN_GAIN:
        return [_nobody(joined, fit, gain)]
    return findings


def _bucketing_gain(joined: JoinedSteps, fit: WorkFit) -> Gain:
    """Predict the saving per step if the ranks shared the work of each step equally.

    That the samples of a bucket need less padding is not counted.
    """
    extra_ns = fit.slope_ns * (fit.work - fit.work.mean(axis=1, keepdims=True))
    return mean_gain(joined, shared_work_ns(joined.own_ns, extra_ns))


def _finding(
    by_work: JoinedSteps,
    late: Lateness,
    index: int,
    chance: float,
    *,
    evidence: Evidence,
    fit: WorkFit,
    gain: Gain,
    facts: dict[str, Any],
) -> Finding:
    rank, rows = int(by_work.ranks[index]), np.flatnonzero(late.late[:, index])
    excess_ns, step_ns = float(np.median(late.excess_ns[rows, index])), float(np.median(by_work.step_ns))
    lost_share = float(cost_shares(by_work, late, np.arange(len(by_work)))[index])
    work = np.median(fit.work, axis=0)
    ratio = work[index] / np.median(np.delete(work, index))
    late_share = len(rows) / len(by_work)
    return Finding(
        code="imbalanced-batches",
        severity=severity_of(lost_share),
        verdict=f"Rank {rank} is late because of its batches",
        measure=f"{duration(excess_ns)} more in {how_often(late_share)}, of a step of {duration(step_ns)}",
        cause=f"its batches have {ratio:.2f} times the {fit.measure} of the other ranks' batches",
        where=evidence.where([rank]),
        remedy=_REMEDY,
        steps=(int(by_work.step[0]), int(by_work.step[-1])),
        ranks=[rank],
        phase=_phase(fit),
        evidence=ImbalancedBatchesFacts(
            step_ns=round(step_ns),
            excess_ns=round(excess_ns),
            late_share=round(late_share, 4),
            lost_share=round(lost_share, 4),
            chance=round(chance, 4),
            **facts,
        ),
        gain=gain,
    )


def _of_constant_batches(slow: SlowRank, constant: ConstantWork, evidence: Evidence) -> Finding:
    ranks = evidence.joined.ranks.tolist()
    index = ranks.index(slow.rank)
    more = constant.work[index] - np.median(np.delete(constant.work, index))
    return Finding(
        code="imbalanced-batches",
        severity=slow.severity,
        verdict=f"Rank {slow.rank} is late because of its batches",
        measure=f"{duration(slow.excess_ns)} more in {how_often(slow.late_share)}, of a step of "
        f"{duration(slow.step_ns)}",
        cause=f"its batches always have {constant.ratio(index):.2f} times the {constant.measure} of the other ranks' "
        "batches",
        where=evidence.where([slow.rank]),
        remedy=_CONSTANT_REMEDY,
        steps=slow.steps,
        ranks=[slow.rank],
        phase=slow.phase,
        evidence=ImbalancedBatchesFacts(
            measure=constant.measure,
            ns_per_unit=round(slow.excess_ns / float(more), 3),
            work=dict(zip(map(str, ranks), constant.work.tolist(), strict=True)),
            machine_excess_ns=None,
            steps_used=slow.steps_used,
            step_ns=slow.step_ns,
            excess_ns=slow.excess_ns,
            late_share=round(slow.late_share, 4),
            lost_share=round(slow.lost_share, 4),
            chance=round(slow.chance, 4),
        ),
        gain=slow.gain,
    )


def _nobody(joined: JoinedSteps, fit: WorkFit, gain: Gain) -> Finding:
    return Finding(
        code="imbalanced-batches",
        severity="info",
        verdict="The ranks wait for the largest batch",
        measure=f"{percent(gain.ratio)} of the steps' time",
        cause="batches are uneven by chance: another rank has the largest in each step",
        remedy=_REMEDY,
        steps=(int(joined.step[0]), int(joined.step[-1])),
        phase=_phase(fit),
        evidence=ImbalancedBatchesFacts(step_ns=round(float(np.median(joined.step_ns))), **_fit_facts(joined, fit)),
        gain=gain,
    )


def _fit_facts(joined: JoinedSteps, fit: WorkFit) -> dict[str, Any]:
    """Return the line, and of each rank the median work and the excess of its median own time at equal work."""
    ranks, equal_ns = joined.ranks.tolist(), np.median(joined.own_ns - fit.extra_ns, axis=0)
    machine_ns = excesses(equal_ns[None])[0]
    return {
        "measure": fit.measure,
        "ns_per_unit": round(fit.slope_ns, 3),
        "work": dict(zip(map(str, ranks), np.median(fit.work, axis=0).tolist(), strict=True)),
        "machine_excess_ns": dict(zip(map(str, ranks), map(round, machine_ns.tolist()), strict=True)),
        "steps_used": len(joined),
    }


def _phase(fit: WorkFit) -> str:
    return wire.OWN_PHASES[int(fit.phase_shares.argmax())]
