"""Finding `comm-bound`: exposed communication takes a large share of the step."""

from __future__ import annotations

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.evidence import MIN_STEPS, Evidence, Judgement
from ddpobs_server.analysis.finding import Finding, NotJudged, format_ranks, severity_of
from ddpobs_server.analysis.joined_steps import Floats, JoinedSteps
from ddpobs_server.analysis.lateness import step_weights

CODES = ("comm-bound",)
COMM_SHARE = 0.3
"""Largest share of exposed communication in the step that is no finding."""
_FIND_LATE_RANK = "Find out why a rank is late"
_MOVE_LESS = "Compress gradients, accumulate over several micro-batches with no_sync"


def comm_bound(evidence: Evidence) -> Judgement:
    """Judge exposed communication above 30 % of the steps; waiting for a late rank is separated from moving bytes.

    Times are means over ranks and steps, weighted by `step_weights`.
    """
    missing = [NotJudged("comm-bound", reason) for reason in _unsplit_reasons(evidence)]
    # A wait after a step, as at a barrier, shows in the own times of the next step.
    rows = np.flatnonzero(evidence.joined.has_successor)
    if len(rows) < MIN_STEPS:
        return [
            NotJudged("comm-bound", f"{len(rows)} of {MIN_STEPS} steps in which all ranks can be compared"),
            *missing,
        ]
    exposed_ns, waiting_ns, wall_ns = _mean_times_ns(evidence.joined, rows)
    if exposed_ns / wall_ns <= COMM_SHARE:
        return missing
    if missing:
        return [_unsplit(evidence, exposed_ns, wall_ns, len(rows)), *missing]
    return [_split(evidence, exposed_ns, waiting_ns, wall_ns, len(rows))]


def _unsplit_reasons(evidence: Evidence) -> list[str]:
    """Return why waiting cannot be separated from moving, at most one reason."""
    if evidence.separate_groups_reason:
        return [f"waiting cannot be separated from moving: {evidence.separate_groups_reason}"]
    if evidence.absent_ranks:
        return [f"waiting cannot be separated from moving without rank {format_ranks(evidence.absent_ranks)}"]
    return []


def _mean_times_ns(joined: JoinedSteps, rows: wire.Ints) -> tuple[float, float, float]:
    """Return exposed, waiting and wall time of a step, as weighted means over these steps and all ranks."""
    weights = step_weights(joined.window_ns[rows])

    def mean(times_ns: Floats) -> float:
        return float(np.average(times_ns.mean(axis=1), weights=weights))

    return mean(joined.exposed_ns[rows]), mean(_waiting_ns(joined, rows)), mean(joined.wall_ns[rows])


def _waiting_ns(joined: JoinedSteps, rows: wire.Ints) -> Floats:
    """Return the part of the exposed communication that waits for the last rank, shape [steps, ranks].

    A rank's wait fits into its own exposed communication first. The rest of the next step's wait, which does not fit
    into that step, was spent in this step.
    """
    waits = joined.own_ns.max(axis=1, keepdims=True) - joined.own_ns
    in_step = np.minimum(waits, joined.exposed_ns)
    free, excess = joined.exposed_ns - in_step, waits - in_step
    return np.asarray(in_step[rows] + np.minimum(free[rows], excess[rows + 1]))


def _split(evidence: Evidence, exposed_ns: float, waiting_ns: float, wall_ns: float, steps_used: int) -> Finding:
    share, moving = exposed_ns / wall_ns, (exposed_ns - waiting_ns) / wall_ns
    mostly_waiting = waiting_ns > exposed_ns / 2
    reason = "most of it waiting for the last rank" if mostly_waiting else "most of it moving bytes"
    if not mostly_waiting:
        remedy = f"{_MOVE_LESS}, or use a faster link."
    elif moving > COMM_SHARE:
        remedy = f"{_FIND_LATE_RANK}. {_MOVE_LESS}, or use a faster link: the bytes alone take {moving:.0%}."
    else:
        remedy = f"{_FIND_LATE_RANK}: a faster network would not help."
    return Finding(
        code="comm-bound",
        severity="info" if mostly_waiting and moving <= COMM_SHARE else severity_of(moving),
        title=f"{share:.0%} of every step is exposed communication, {reason}",
        remedy=remedy,
        steps=evidence.step_range,
        phase="exposed_comm",
        evidence={
            "exposed_share": round(share, 4),
            "exposed_ns": round(exposed_ns),
            "waiting_ns": round(waiting_ns),
            "moving_ns": round(exposed_ns - waiting_ns),
            "steps_used": steps_used,
        },
    )


def _unsplit(evidence: Evidence, exposed_ns: float, wall_ns: float, steps_used: int) -> Finding:
    """Return a finding that claims neither waiting nor moving: waiting for an unseen rank looks like moving bytes."""
    share = exposed_ns / wall_ns
    compare_groups = "Look at each process group by itself: waits across groups are not recorded."
    telemetry_first = (
        f"Get the telemetry of rank {format_ranks(evidence.absent_ranks)} first: waiting for a rank without "
        "telemetry looks like moving bytes."
    )
    return Finding(
        code="comm-bound",
        severity="info",
        title=f"{share:.0%} of every step is exposed communication; whether ranks wait for a late rank is unknown",
        remedy=compare_groups if evidence.separate_groups_reason else telemetry_first,
        steps=evidence.step_range,
        phase="exposed_comm",
        evidence={
            "exposed_share": round(share, 4),
            "exposed_ns": round(exposed_ns),
            "steps_used": steps_used,
        },
    )
