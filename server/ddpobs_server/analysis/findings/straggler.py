"""Finding `straggler`: ranks are late by their own doing, more often than chance explains.

It names the rank, the phase, for a slow backward the bucket, and the steps in which the rank was slow. Ranks may also
be slow in turn. The comparison of ranks is in `lateness.py`, the tests against chance are in `recurrence.py`, stretches
of a run are in `stretches.py`, slowness in turn is in `turns.py`, and the bucket is found in `late_bucket.py`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ddpobs_server.analysis.evidence import ColumnsTooLargeError, Evidence, Judgement
from ddpobs_server.analysis.finding import Finding, NotJudged, severity_of
from ddpobs_server.analysis.slow_ranks.late_bucket import name_late_buckets
from ddpobs_server.analysis.slow_ranks.lateness import (
    Lateness,
    causes,
    cost_shares,
    gain,
    lateness,
    steady_lateness,
    step_weights,
    typical_lateness,
)
from ddpobs_server.analysis.slow_ranks.recurrence import (
    beyond_chance,
    costly_ranks,
    onset,
    recurring_ranks,
    steady_levels,
)
from ddpobs_server.analysis.slow_ranks.slow_in_turn import in_turn
from ddpobs_server.analysis.slow_ranks.slow_rank_cause import with_cause
from ddpobs_server.analysis.slow_ranks.slow_stretches import REMEDIES, WholeRun, past_findings, with_extent
from ddpobs_server.analysis.slow_ranks.work import at_equal_work, without_run_delay
from ddpobs_server.analysis.steps.joined_steps import JoinedSteps
from ddpobs_server.analysis.steps.pipeline import Stage

CODES = ("straggler",)
MIN_COMPARED_STEPS = 32
RECENT_STEPS = 1024
"""Latest steps that are judged as one. Stretches of the whole run are judged by themselves."""
_SUDDEN = {128: 0.1, 64: 0.2}
"""Numbers of latest steps that are also judged by themselves, and the least cost share in each of their quarters.

A rank that has just become slow is not slow in all quarters of `RECENT_STEPS`. A burst of noise may fill so few steps,
so the rank must also be late in `_SUDDEN_LATE_SHARE` of each quarter."""
_SUDDEN_LATE_SHARE = 0.8
_PERSISTENT_SHARE = 0.6
_MAIN_PHASE_SHARE = 0.9
"""Share of the delay below which the title states the delay in the main phase, too."""
_OWN_LEVEL_SHARE = 0.9
"""Least share of a rank's usual excess that is left without its time in the run queue, for that time to be left out."""
_NOT_ALONE = " Other ranks are late in the same steps: most of the gain needs them to be fixed too."


def straggler(evidence: Evidence) -> Judgement:
    """Return a finding for each rank that is late more often than chance, and costly enough to matter.

    In a pipeline, the ranks that hold the same stages are compared: other stages compute other layers.
    """
    if evidence.stages:
        return [_of_stage(result, stage) for stage in evidence.stages for result in straggler(evidence.of_stage(stage))]
    missing = [
        NotJudged("straggler", reason) for reason in (_not_judged_reason(evidence), *evidence.absence_reasons) if reason
    ]
    if _not_judged_reason(evidence):
        return missing
    fit = evidence.work_fit
    if fit is not None:  # Lateness from larger batches is the finding `imbalanced-batches`.
        evidence = replace(evidence, joined=at_equal_work(evidence.joined, fit))
    run = WholeRun.of(evidence)
    recent_steps = evidence.joined.latest(RECENT_STEPS)
    recent = _straggler_findings(recent_steps, _undisturbed(recent_steps, evidence), evidence.hosts)
    slow_in_turn = in_turn(run, {finding.ranks[0] for finding in recent if not _may_be_a_turn(finding)})
    in_turn_ranks = {rank for finding in slow_in_turn for rank in finding.ranks}
    recent = [finding for finding in recent if finding.ranks[0] not in in_turn_ranks]
    findings = [extended for finding in recent if (extended := with_extent(finding, run)) is not None]
    findings += past_findings(run, findings, slow_in_turn, evidence.hosts)
    if fit is not None:
        error_ns = dict(zip(evidence.joined.ranks.tolist(), fit.error_ns, strict=True))
        findings = [finding for finding in findings if finding.evidence["excess_ns"] >= error_ns[finding.ranks[0]]]
    if evidence.columns is not None:
        try:
            findings = name_late_buckets(findings, evidence, evidence.columns)
        except ColumnsTooLargeError as error:
            missing.append(NotJudged("buckets", str(error)))
    return [*(with_cause(finding, evidence) for finding in findings), *slow_in_turn, *missing]


def _of_stage(result: Finding | NotJudged, stage: Stage) -> Finding | NotJudged:
    """Name the stage in a result about its replicas."""
    if isinstance(result, NotJudged):
        return replace(result, reason=f"{stage.name}: {result.reason}")
    verdict = result.verdict.replace("the other ranks", f"the other replicas of {stage.name}")
    return replace(result, verdict=verdict, evidence=result.evidence | {"stages": list(stage.held)})


def _not_judged_reason(evidence: Evidence) -> str:
    joined = evidence.joined
    if evidence.separate_groups_reason:
        return evidence.separate_groups_reason
    if len(joined.ranks) < 2:
        return "needs steps of at least two ranks"
    if len(joined) < MIN_COMPARED_STEPS:
        return f"{len(joined)} of {MIN_COMPARED_STEPS} steps in which the own time of every rank is recorded"
    return ""


def _may_be_a_turn(finding: Finding) -> bool:
    """Whether other ranks are late in other phases of the same steps."""
    most_ns: int = max(finding.evidence["phase_excess_ns"].values(), default=0)
    return most_ns > 2 * int(finding.evidence["excess_ns"])


def _undisturbed(joined: JoinedSteps, evidence: Evidence) -> JoinedSteps | None:
    """Return the steps with own times that other processes do not disturb; None where these are not known."""
    own_ns, _ = without_run_delay(joined.own_ns, joined.row, evidence.steps) if joined.row.size else (joined.own_ns, 0)
    return None if own_ns is joined.own_ns else replace(joined, own_ns=own_ns)


def _straggler_findings(joined: JoinedSteps, undisturbed: JoinedSteps | None, hosts: dict[int, str]) -> list[Finding]:
    """Judge all steps, then the latest steps by themselves, then small delays of every step, then rare long delays.

    A small delay of every step may be seen only without the time in the run queue: other processes disturb each step
    by more. A rank that such a delay explains is described without that time. Beside a rank that the run queue makes
    late, no other rank is judged so: it waits for that rank, and the split of that rank's time has an error.

    Args:
        joined: The compared steps.
        undisturbed: The same steps without the ranks' time in the run queue; None if it is not known.
        hosts: Host of each rank.
    """
    late = lateness(joined)
    levels_ns = steady_levels(joined, late)
    recurring = beyond_chance(late.late, recurring_ranks(joined, late))
    small = {}
    if undisturbed is not None:
        without_queue = lateness(undisturbed)
        if not any(_late_by_the_queue(late, without_queue, index) for index in recurring):
            small = _small_delays(undisturbed, without_queue, hosts, left_out=True)
    findings = []
    for index, chance in recurring.items():
        finding = _finding(joined, late, index, chance, hosts, level_ns=levels_ns.get(index))
        own = small.get(index)
        if own is not None and own.evidence["excess_ns"] >= _OWN_LEVEL_SHARE * finding.evidence["excess_ns"]:
            finding = replace(own, severity=severity_of(own.evidence["lost_share"]))
        findings.append(finding)
    findings += _sudden_findings(joined, late, set(recurring), hosts)
    small = _small_delays(joined, late, hosts) | small
    named_ranks = {finding.ranks[0] for finding in findings}
    findings += [finding for finding in small.values() if finding.ranks[0] not in named_ranks]
    return findings + _seldom_findings(joined, late, {finding.ranks[0] for finding in findings}, hosts)


def _late_by_the_queue(late: Lateness, without_queue: Lateness, index: int) -> bool:
    """Whether time in the run queue is most of the excess of a rank in the steps in which it is late."""
    rows = late.late[:, index]
    left_ns, excess_ns = (np.median(judged.excess_ns[rows, index]) for judged in (without_queue, late))
    return bool(left_ns < excess_ns / 2)


def _small_delays(
    joined: JoinedSteps, late: Lateness, hosts: dict[int, str], *, left_out: bool = False
) -> dict[int, Finding]:
    """Return a finding for each rank that is slow in every step, by its index; `left_out` is the time in the queue."""
    findings = {}
    for index, level_ns in steady_levels(joined, late).items():
        for chance in beyond_chance(steady_lateness(late, level_ns).late, [index]).values():
            finding = _finding(joined, late, index, chance, hosts, level_ns=level_ns)
            verdict = finding.verdict + " (without time in the run queue)" * left_out
            evidence = finding.evidence | {"run_delay_left_out": left_out}
            findings[index] = replace(finding, severity="info", verdict=verdict, evidence=evidence)
    return findings


def _sudden_findings(
    joined: JoinedSteps, late: Lateness, named_indices: set[int], hosts: dict[int, str]
) -> list[Finding]:
    """Return a finding for each further rank that has become slow, based on the steps since its onset."""
    findings = []
    for count, min_cost_share in _SUDDEN.items():
        if len(joined) <= count:
            continue
        recent, recent_late = joined.latest(count), late.latest(count)
        recurring = recurring_ranks(recent, recent_late, _SUDDEN_LATE_SHARE, min_cost_share)
        for index, chance in beyond_chance(recent_late.late, sorted(set(recurring) - named_indices)).items():
            steps = len(joined) - onset(late.late[:, index], float(recent_late.late[:, index].mean()))
            findings.append(_finding(joined.latest(steps), late.latest(steps), index, chance, hosts, sudden=True))
            named_indices |= {index}
    return findings


def _seldom_findings(
    joined: JoinedSteps, late: Lateness, named_ranks: set[int], hosts: dict[int, str]
) -> list[Finding]:
    """Return a finding for each further rank that is seldom late, but costs more than chance explains."""
    suspects = [index for index in costly_ranks(joined, late) if joined.ranks[index] not in named_ranks]
    cost_ns = step_weights(joined.window_ns)[:, None] * late.cost_ns
    chances = beyond_chance(cost_ns, suspects)
    return [_finding(joined, typical_lateness(joined, late, index), index, chances[index], hosts) for index in chances]


def _finding(
    joined: JoinedSteps,
    late: Lateness,
    index: int,
    chance: float,
    hosts: dict[int, str],
    *,
    sudden: bool = False,
    level_ns: float | None = None,
) -> Finding:
    """Describe a rank's lateness; `level_ns` is the usual excess of a rank that is slow in every step."""
    lost_share = float(cost_shares(joined, late, np.arange(len(joined)))[index])
    if level_ns is not None:
        late = steady_lateness(late, level_ns)
    rank, rows = int(joined.ranks[index]), np.flatnonzero(late.late[:, index])
    typical = rows if level_ns is None else rows[late.excess_ns[rows, index] <= 1.5 * level_ns]
    explained = causes(joined, index, typical, usual=level_ns is not None)
    phase = explained[0][0] if explained else "other"
    late_share = len(rows) / len(joined)
    excess_ns, step_ns = float(np.median(late.excess_ns[typical, index])), float(np.median(joined.step_ns))
    phase_ns = explained[0][1] if explained else excess_ns
    in_phase = f" ({phase_ns / 1e6:.1f} ms of it in {phase})" if phase_ns < _MAIN_PHASE_SHARE * excess_ns else ""
    saving = gain(joined, late, index)
    first, last = int(joined.step[0]), int(joined.step[-1])
    since = f" since step {first}" if sudden else ""
    return Finding(
        code="straggler",
        severity=severity_of(lost_share),
        verdict=(
            f"Rank {rank} is slow in {phase}: {excess_ns / 1e6:.1f} ms more than the other ranks{in_phase} "
            f"{_frequency(late_share)}{since}, of a step of {step_ns / 1e6:.1f} ms"
        ),
        remedy=REMEDIES[phase] + (_NOT_ALONE if saving.ratio < 0.5 * lost_share else ""),
        steps=(first, last),
        ranks=[rank],
        phase=phase,
        evidence={
            "kind": "persistent" if late_share >= _PERSISTENT_SHARE else "intermittent",
            "run_delay_left_out": False,
            "host": hosts.get(rank),
            "since_step": first if sudden else None,
            "late_share": round(late_share, 4),
            "lost_share": round(lost_share, 4),
            "chance": round(chance, 4),
            "excess_ns": round(excess_ns),
            "step_ns": round(step_ns),
            "phase_excess_ns": {name: round(ns) for name, ns in explained},
            "own_ns": _median_own_ns(joined),
            "steps_used": len(joined),
        },
        gain=saving,
    )


def _frequency(late_share: float) -> str:
    return "in every step" if late_share > 0.98 else f"in {late_share:.0%} of the steps"


def _median_own_ns(joined: JoinedSteps) -> dict[str, int]:
    medians_ns = np.median(joined.own_ns, axis=0).tolist()
    return {str(rank): round(ns) for rank, ns in zip(joined.ranks.tolist(), medians_ns, strict=True)}
