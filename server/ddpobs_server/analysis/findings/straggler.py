"""Finding `straggler`: ranks are late by their own doing, more often than chance explains.

`slow_ranks/` has what this file composes. Detectors find slow ranks: `recent.py` in the latest steps, `in_turn.py`
several ranks, `slow_stretches.py` in any part of the run. `extent.py`, `bucket.py` and `cause.py` complete them, and
`describe.py` puts them in words.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ddpobs_server.analysis.evidence import ColumnsTooLargeError, Evidence, Judgement
from ddpobs_server.analysis.finding import Finding, NotJudged
from ddpobs_server.analysis.slow_ranks.bucket import with_buckets
from ddpobs_server.analysis.slow_ranks.cause import OWN_WORK, with_cause
from ddpobs_server.analysis.slow_ranks.describe import describe_in_turn, describe_slow_rank
from ddpobs_server.analysis.slow_ranks.extent import with_extent
from ddpobs_server.analysis.slow_ranks.facts import MovingFacts, SlowRankFacts, TakingTurnsFacts
from ddpobs_server.analysis.slow_ranks.in_turn import slow_in_turn
from ddpobs_server.analysis.slow_ranks.recent import recently_slow
from ddpobs_server.analysis.slow_ranks.slow_rank import SlowInTurn, SlowRank
from ddpobs_server.analysis.slow_ranks.slow_stretches import slow_in_stretches
from ddpobs_server.analysis.slow_ranks.whole_run import WholeRun
from ddpobs_server.analysis.slow_ranks.work import (
    ConstantWork,
    at_equal_work,
    uneven_constant_work,
    without_run_delay,
)
from ddpobs_server.analysis.steps.joined_steps import JoinedSteps
from ddpobs_server.analysis.steps.pipeline import Stage
from ddpobs_server.analysis.steps.rank_groups import RankGroup

CODES = ("straggler",)
FACTS = (SlowRankFacts, MovingFacts, TakingTurnsFacts)
MIN_COMPARED_STEPS = 32
RECENT_STEPS = 1024
"""Latest steps that are judged as one. Stretches of the whole run are judged by themselves."""
UNEVEN = 0.1
"""Minimum difference of the ranks' constant work, as a share of it, that counts."""
_MAX_OF_RATIO = 1.25
"""Maximum delay that more work explains, as a multiple of the time that is in proportion to it."""


def straggler(evidence: Evidence) -> Judgement:
    """Return a finding for each rank that is late more often than chance, and costly enough to matter.

    In a pipeline, the ranks that hold the same stages are compared: other stages compute other layers. If gradients are
    reduced over a part of the ranks, as beside tensor parallelism, those of the same process group are compared.
    """
    parts = evidence.stages or evidence.groups
    if not parts:
        return _judged(evidence, None)
    return [result for part in parts for result in _judged(evidence.of_part(part), part)]


def _judged(evidence: Evidence, part: Stage | RankGroup | None) -> list[Finding | NotJudged]:
    where = f"{part.members}: " if part else ""
    reason = _not_judged_reason(evidence)
    missing = [NotJudged("straggler", where + text) for text in (reason, *evidence.absence_reasons) if text]
    if reason:
        return [*missing]
    slow_ranks, in_turn = slow_at_equal_work(evidence)
    by_batches = {slow.rank for slow, _ in slow_by_constant_batches(evidence)} if part is None else set()
    slow_ranks = [slow for slow in slow_ranks if slow.rank not in by_batches]
    if evidence.columns is not None:
        try:
            slow_ranks = with_buckets(slow_ranks, evidence, evidence.columns)
        except ColumnsTooLargeError as error:
            missing.append(NotJudged("buckets", f"{where}{error}"))
    return [
        *(describe_slow_rank(slow, evidence, part) for slow in slow_ranks),
        *(describe_in_turn(slow, evidence, part) for slow in in_turn),
        *missing,
    ]


def slow_at_equal_work(evidence: Evidence) -> tuple[list[SlowRank], list[SlowInTurn]]:
    """Return the ranks that are slow by themselves, each with its cause, and those that are slow in turn.

    Lateness from larger batches is left out, as far as the sizes of the batches vary.
    """
    if "slow" not in evidence.shared:
        evidence.shared["slow"] = _slow_at_equal_work(evidence)
    slow: tuple[list[SlowRank], list[SlowInTurn]] = evidence.shared["slow"]
    return slow


def _slow_at_equal_work(evidence: Evidence) -> tuple[list[SlowRank], list[SlowInTurn]]:
    fit = evidence.work_fit
    if fit is not None:
        evidence = replace(evidence, joined=at_equal_work(evidence.joined, fit))
    slow_ranks, in_turn = _detected(evidence)
    if fit is not None:
        error_ns = dict(zip(evidence.joined.ranks.tolist(), fit.error_ns, strict=True))
        slow_ranks = [slow for slow in slow_ranks if slow.excess_ns >= error_ns[slow.rank]]
    return [with_cause(slow, evidence) for slow in slow_ranks], in_turn


def uneven_batches(evidence: Evidence) -> ConstantWork | None:
    """Return the work of each rank in the latest steps, if it is constant and differs over the ranks."""
    if "uneven" not in evidence.shared:
        joined = evidence.joined.latest(RECENT_STEPS)
        evidence.shared["uneven"] = uneven_constant_work(joined, evidence.steps, UNEVEN)
    uneven: ConstantWork | None = evidence.shared["uneven"]
    return uneven


def slow_by_constant_batches(evidence: Evidence) -> list[tuple[SlowRank, ConstantWork]]:
    """Return the slow ranks whose batches always hold more than the others', if no counter explains the delay.

    Their own time exceeds the others' by no more than their work does.
    """
    joined = evidence.joined.latest(RECENT_STEPS)
    constant = uneven_batches(evidence) if _not_judged_reason(evidence) == "" else None
    if constant is None:
        return []
    medians_ns, ranks = joined.usual_own_ns, joined.ranks.tolist()

    def is_explained(slow: SlowRank) -> bool:
        index = ranks.index(slow.rank)
        ratio, usual_ns = constant.ratio(index), float(np.median(np.delete(medians_ns, index)))
        return ratio > 1 + UNEVEN and slow.excess_ns <= _MAX_OF_RATIO * (ratio - 1) * usual_ns

    slow_ranks, _ = slow_at_equal_work(evidence)
    own_work = [slow for slow in slow_ranks if slow.cause.name in (None, OWN_WORK) and slow.is_persistent]
    return [(slow, constant) for slow in own_work if is_explained(slow)]


def _not_judged_reason(evidence: Evidence) -> str:
    joined = evidence.joined
    if evidence.separate_groups_reason:
        return evidence.separate_groups_reason
    if len(joined.ranks) < 2:
        return "needs steps of at least two ranks"
    if len(joined) < MIN_COMPARED_STEPS:
        return f"{len(joined)} of {MIN_COMPARED_STEPS} steps in which the own time of every rank is recorded"
    return ""


def _detected(evidence: Evidence) -> tuple[list[SlowRank], list[SlowInTurn]]:
    """Return the ranks that are slow by themselves, with their extent, and those that are slow in turn."""
    run = WholeRun.of(evidence)
    latest = evidence.joined.latest(RECENT_STEPS)
    recent = recently_slow(latest, _undisturbed(latest, evidence))
    in_turn = slow_in_turn(run, recent)
    ranks_in_turn = {rank for slow in in_turn for rank in slow.ranks}
    extended = [with_extent(slow, run) for slow in recent if slow.rank not in ranks_in_turn]
    slow_ranks = [slow for slow in extended if slow is not None]
    return slow_ranks + slow_in_stretches(run, slow_ranks, in_turn), in_turn


def _undisturbed(joined: JoinedSteps, evidence: Evidence) -> JoinedSteps | None:
    """Return the steps with own times that other processes do not disturb; None where these are not known."""
    own_ns, _ = without_run_delay(joined.own_ns, joined.row, evidence.steps) if joined.row.size else (joined.own_ns, 0)
    return None if own_ns is joined.own_ns else replace(joined, own_ns=own_ns)
