"""Finding `comm-bound`: exposed communication takes a large share of the step."""

from __future__ import annotations

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.evidence import MIN_STEPS, Evidence, Judgement
from ddpobs_server.analysis.finding import Finding, NotJudged, format_ranks, severity_of
from ddpobs_server.analysis.findings.straggler import weights
from ddpobs_server.analysis.joined_steps import Floats, Joined

COMM_SHARE = 0.3
"""Exposed communication above this share of the step is an alarm."""


def comm_bound(evidence: Evidence) -> Judgement:
    """Exposed communication above 30 % of the steps; waiting for a late rank is told apart from moving bytes.

    Times are means over ranks and steps, none of which counts for more than a few median ones.
    """
    joined = evidence.joined
    # What a step's end waits for, as at a barrier, shows in the own times of the step after it.
    rows = np.flatnonzero(joined.followed)
    if len(rows) < MIN_STEPS:
        return NotJudged("comm-bound", f"{len(rows)} of {MIN_STEPS} steps in which all ranks can be compared")
    counts = weights(joined.window_ns[rows])  # One that holds a stall is as long as thousands.

    def mean(times_ns: Floats) -> float:
        return float(np.average(times_ns.mean(axis=1), weights=counts))

    exposed_ns, wall_ns = mean(joined.exposed_ns[rows]), mean(joined.wall_ns[rows])
    share = exposed_ns / wall_ns
    if share <= COMM_SHARE:
        return []
    if evidence.absent or evidence.apart:
        return [_unsplit(evidence, share, exposed_ns, len(rows))]
    waiting_ns = mean(_waiting_ns(joined, rows))
    moving = (exposed_ns - waiting_ns) / wall_ns
    mostly_waiting = waiting_ns > exposed_ns / 2
    reason = "most of it waiting for the last rank" if mostly_waiting else "most of it moving bytes"
    waits, moves = (
        "Find out why a rank is late",
        "Compress gradients, accumulate over several micro-batches with no_sync",
    )
    if not mostly_waiting:
        remedy = f"{moves}, or use a faster link."
    elif moving > COMM_SHARE:
        remedy = f"{waits}. {moves}, or use a faster link: the bytes alone take {moving:.0%}."
    else:
        remedy = f"{waits}: a faster network would not help."
    return [
        Finding(
            code="comm-bound",
            severity="info" if mostly_waiting and moving <= COMM_SHARE else severity_of(moving),
            title=f"{share:.0%} of every step is exposed communication, {reason}",
            remedy=remedy,
            steps=evidence.seen,
            phase="exposed_comm",
            evidence={
                "exposed_share": round(share, 4),
                "exposed_ns": round(exposed_ns),
                "waiting_ns": round(waiting_ns),
                "moving_ns": round(exposed_ns - waiting_ns),
                "steps_used": len(rows),
            },
        )
    ]


def _waiting_ns(joined: Joined, rows: wire.Ints) -> Floats:
    """How much of these steps' exposed communication is waiting for the last rank, shape [steps, ranks].

    In a step's own, and what is left of it where the next step's own does not hold what that waits.
    """
    waits = joined.own_ns.max(axis=1, keepdims=True) - joined.own_ns
    within = np.minimum(waits, joined.exposed_ns)
    left, beyond = joined.exposed_ns - within, waits - within
    return np.asarray(within[rows] + np.minimum(left[rows], beyond[rows + 1]))


def _unsplit(evidence: Evidence, share: float, exposed_ns: float, steps_used: int) -> Finding:
    """Waiting for a rank that is not seen looks like moving bytes: neither is claimed."""
    one_by_one = "Look at each process group by itself: what a rank waits for is not seen across groups."
    telemetry_first = (
        f"Get the telemetry of rank {format_ranks(evidence.absent)} first: waiting for a rank without "
        "telemetry looks like moving bytes."
    )
    return Finding(
        code="comm-bound",
        severity="info",
        title=f"{share:.0%} of every step is exposed communication; whether a rank is waited for cannot be told",
        remedy=one_by_one if evidence.apart else telemetry_first,
        steps=evidence.seen,
        phase="exposed_comm",
        evidence={
            "exposed_share": round(share, 4),
            "exposed_ns": round(exposed_ns),
            "steps_used": steps_used,
        },
    )
