"""Finding `lost`: the ranks sent pulses, and none sends any more; with what the last pulses show."""

from __future__ import annotations

from dataclasses import dataclass

from ddpobs import wire
from ddpobs.shared.quantities import duration, time_of_day
from ddpobs.shared.words import format_ranks
from ddpobs.wire.facts import DUMPED
from ddpobs_server.analysis.causes.rank_ends import place_in_step
from ddpobs_server.analysis.evidence import Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding

CODES = ("lost",)
_TOGETHER_NS = 5 * 10**9
"""Ranks whose last batches arrived within this time fell silent together: pulses are sent every two seconds."""
_MAX_PLACES = 3
_REMEDY = (
    "Look for the job in the scheduler, and check that its hosts are up. If it trains on, check the network from them "
    "to the collector."
)


@dataclass(frozen=True)
class LostFacts(Facts):
    """What was last received of a run that fell silent.

    Attributes:
        earlier_ns: Time from a rank's last batch to that of the last rank.
        activities: Activity at a rank's last pulse.
        in_step: Step at a rank's last pulse.
        places: Place in the code at a rank's last pulse.
    """

    earlier_ns: dict[int, int]
    activities: dict[int, str]
    in_step: dict[int, int]
    places: dict[int, str]


FACTS = (LostFacts,)


def lost(evidence: Evidence) -> Judgement:
    """Report that no rank sends any more. It is a warning: why is not known, as nothing arrives that could show it."""
    if not evidence.is_lost or any(event.kind == DUMPED for _, event in evidence.events):
        return []  # Nothing follows the import of dumps.
    silent = [rank for rank in range(evidence.world_size) if not evidence.ended.get(rank)]
    last_ns = {rank: at_ns for rank, at_ns in evidence.last_batch_ns.items() if rank in silent}
    earlier_ns = {rank: max(last_ns.values()) - at_ns for rank, at_ns in last_ns.items()}
    latest = [rank for rank, ns in sorted(earlier_ns.items()) if ns < _TOGETHER_NS]
    pulses = {rank: evidence.pulses[rank] for rank in silent if rank in evidence.pulses}
    step = max([evidence.step_range[1], *(pulse.step for pulse in pulses.values())])
    return [
        Finding(
            code="lost",
            severity="warning",
            verdict=f"No rank has sent anything since {time_of_day(max(evidence.last_batch_ns.values()))}",
            measure=_order(silent, earlier_ns),
            cause=f"not known: no end was reported from {format_ranks(silent)}",
            where=evidence.where(latest, *_places({rank: pulses[rank] for rank in latest if rank in pulses})),
            remedy=_REMEDY,
            steps=(step, step),
            ranks=latest,
            evidence=LostFacts(
                earlier_ns={rank: ns for rank, ns in earlier_ns.items() if ns},
                activities={rank: pulse.activity for rank, pulse in pulses.items()},
                in_step={rank: pulse.step for rank, pulse in pulses.items()},
                places={rank: pulse.place for rank, pulse in pulses.items() if pulse.place},
            ),
        )
    ]


def _order(silent: list[int], earlier_ns: dict[int, int]) -> str:
    """Which ranks fell silent before the last ones; empty if there is one rank."""
    parts = []
    if absent := [rank for rank in silent if rank not in earlier_ns]:
        parts.append(f"{format_ranks(absent)} never sent anything")
    if before := {rank: ns for rank, ns in sorted(earlier_ns.items()) if ns >= _TOGETHER_NS}:
        parts.append(f"{format_ranks(list(before))} fell silent {duration(min(before.values()))} before the last ones")
    if not parts and len(silent) > 1:
        everyone = "both ranks" if len(silent) == 2 else f"all {len(silent)} ranks"
        parts.append(f"{everyone} fell silent within {duration(_TOGETHER_NS)}")
    return "; ".join(parts)


def _places(pulses: dict[int, wire.Pulse]) -> list[str]:
    """Where each of these ranks was at its last pulse, the place of most ranks first."""
    groups: dict[str, list[int]] = {}
    for rank, pulse in pulses.items():
        line = f" ({pulse.place})" if pulse.place else ""
        groups.setdefault(f"{place_in_step(pulse.phase, pulse.step, pulse.synchronised)}{line}", []).append(rank)
    most = sorted(groups.items(), key=lambda group: -len(group[1]))
    named = [f"{format_ranks(ranks)} {place}" for place, ranks in most[:_MAX_PLACES]]
    others = sum(len(ranks) for _, ranks in most[_MAX_PLACES:])
    return [*named, *([f"{others} ranks elsewhere"] if others else [])]
