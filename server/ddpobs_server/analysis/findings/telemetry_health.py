"""Findings about telemetry itself: lost records, and clocks that differ."""

from __future__ import annotations

from ddpobs_server.analysis.evidence import Evidence, Judgement
from ddpobs_server.analysis.finding import Finding

LOST_SHARE = 0.01
"""Of the records, or of the batches of ranks that ended: findings may be wrong with more of them lost."""


_AHEAD_NS = 60 * 10**9


def telemetry_loss(evidence: Evidence) -> Judgement:
    """Records were dropped on a rank, or batches are missing here: always said."""
    lossy = sorted(
        {rank for rank, count in evidence.dropped.items() if count}
        | {rank for rank, count in evidence.missing_batches.items() if count}
    )
    if not lossy:
        return []
    dropped, emitted = sum(evidence.dropped.values()), max(1, sum(evidence.emitted.values()))
    gaps = sum(evidence.missing_batches.values())
    lost_share = max(dropped / emitted, gaps / max(1, evidence.sent_batches))
    return [
        Finding(
            code="telemetry-loss",
            severity="warning" if lost_share > LOST_SHARE else "info",
            title=f"{dropped} of {emitted} records were dropped and {gaps} batches have not arrived",
            remedy="Look at the collector's load; send what is left in a spool with `ddpobs push`.",
            steps=evidence.seen,
            ranks=lossy,
            evidence={"dropped": evidence.dropped, "missing_batches": evidence.missing_batches},
        )
    ]


def clock_skew(evidence: Evidence) -> Judgement:
    """A wall clock is ahead of the collector's by more than a minute; one behind cannot be told from late delivery."""
    ahead = {rank: by for rank, by in evidence.ahead_ns.items() if by > _AHEAD_NS}
    if not ahead:
        return []
    ranks = sorted(ahead)
    return [
        Finding(
            code="clock-skew",
            severity="info",
            title=f"Wall clocks are up to {max(ahead.values()) / 1e9:.0f} s ahead of the collector's",
            remedy="Set the clocks of these hosts, or the collector's. Step times use neither: only dates are wrong.",
            steps=evidence.seen,
            ranks=ranks,
            evidence={"ahead_ns": ahead},
        )
    ]
