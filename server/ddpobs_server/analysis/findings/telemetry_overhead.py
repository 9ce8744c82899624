"""The run's own cost of telemetry, as measured by steps in which it rested."""

from __future__ import annotations

from dataclasses import dataclass

from ddpobs.shared.words import format_ranks, percent
from ddpobs_server.analysis.evidence import Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding, NotJudged
from ddpobs_server.analysis.own_cost import own_cost

CODES = ("telemetry-overhead",)
MAX_COST = 0.01
"""Cost that telemetry may have, as a share of a step without it."""


@dataclass(frozen=True)
class TelemetryOverheadFacts(Facts):
    """Cost of telemetry.

    Attributes:
        cost_ratio: What it adds to a step, as a share of a step without it.
        low_ratio: Lower bound of the 95 % interval of this share.
        high_ratio: Upper bound of this share.
        rests: Number of rests that it is measured by.
    """

    cost_ratio: float
    low_ratio: float
    high_ratio: float
    rests: int


FACTS = (TelemetryOverheadFacts,)


def telemetry_overhead(evidence: Evidence) -> Judgement:
    """Report a cost whose whole interval is above 1 %."""
    measured = own_cost(evidence.processes)
    if measured is None:
        rests = any(outside.kind == "resting" for p in evidence.processes if p.account for outside in p.account.outside)
        return [NotJudged("telemetry-overhead", "telemetry has rested too seldom so far")] if rests else []
    rank, cost = measured
    if cost.low - 1 <= MAX_COST:
        return []
    return [
        Finding(
            code="telemetry-overhead",
            severity="warning",
            verdict=f"Telemetry adds {percent(cost.ratio - 1, 1)} to a step",
            measure=f"{percent(cost.low - 1, 1)} to {percent(cost.high - 1, 1)}, from {cost.pairs} rests of telemetry",
            cause="not known: the rests show how much time telemetry takes, not where",
            where=evidence.where([rank], format_ranks([rank])),
            remedy="Raise `DDPOBS_FLUSH_S` and `DDPOBS_READINESS_EVERY`, and give each rank a processor more than it "
            "computes on; switch telemetry off where the cost stays.",
            steps=evidence.step_range,
            ranks=[],
            evidence=TelemetryOverheadFacts(cost.ratio - 1, cost.low - 1, cost.high - 1, cost.pairs),
        )
    ]
