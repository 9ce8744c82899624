"""Findings about the telemetry itself: lost records, and clocks that differ."""

from __future__ import annotations

from dataclasses import dataclass

from ddpobs.shared.words import format_ranks
from ddpobs_server.analysis.evidence import Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding

CODES = ("telemetry-loss", "clock-skew")
LOST_SHARE = 0.01
"""Share of lost records, or of missing batches of ranks that ended, above which other findings may be wrong."""
_MAX_AHEAD_NS = 60 * 10**9


@dataclass(frozen=True)
class TelemetryLossFacts(Facts):
    """Telemetry that did not arrive.

    Attributes:
        dropped: Dropped records by rank.
        missing_batches: Missing batches by rank.
    """

    dropped: dict[int, int]
    missing_batches: dict[int, int]


@dataclass(frozen=True)
class ClockSkewFacts(Facts):
    """Wall clocks that are ahead.

    Attributes:
        ahead_ns: Time by which a rank's clock is ahead of the collector's, by rank.
    """

    ahead_ns: dict[int, int]


FACTS = (TelemetryLossFacts, ClockSkewFacts)


def telemetry_loss(evidence: Evidence) -> Judgement:
    """Report dropped records and missing batches, however few."""
    lossy = sorted(
        {rank for rank, count in evidence.dropped.items() if count}
        | {rank for rank, count in evidence.missing_batches.items() if count}
    )
    if not lossy:
        return []
    dropped, emitted = sum(evidence.dropped.values()), max(1, sum(evidence.emitted.values()))
    missing = sum(evidence.missing_batches.values())
    lost_share = max(dropped / emitted, missing / max(1, evidence.sent_batches))
    return [
        Finding(
            code="telemetry-loss",
            severity="warning" if lost_share > LOST_SHARE else "info",
            verdict="Telemetry is incomplete",
            measure=f"{dropped} of {emitted} records were dropped, {missing} batches have not arrived",
            cause="not known: the ranks count what is lost, not why",
            where=evidence.where(lossy, format_ranks(lossy)),
            remedy="Check the collector's load; send the batches left in a spool with `ddpobs push`.",
            steps=evidence.step_range,
            ranks=lossy,
            evidence=TelemetryLossFacts(evidence.dropped, evidence.missing_batches),
        )
    ]


def clock_skew(evidence: Evidence) -> Judgement:
    """Report wall clocks more than a minute ahead of the collector's; a clock behind looks like late delivery."""
    ahead = {rank: ns for rank, ns in evidence.ahead_ns.items() if ns > _MAX_AHEAD_NS}
    if not ahead:
        return []
    return [
        Finding(
            code="clock-skew",
            severity="info",
            verdict="Wall clocks are ahead of the collector's",
            measure=f"up to {max(ahead.values()) / 1e9:.0f} s",
            cause="not known: either clock may be wrong",
            where=evidence.where(sorted(ahead), format_ranks(sorted(ahead))),
            remedy="Set the clocks of these hosts, or the collector's. Step times use neither: only dates are wrong.",
            steps=evidence.step_range,
            ranks=sorted(ahead),
            evidence=ClockSkewFacts(ahead),
        )
    ]
