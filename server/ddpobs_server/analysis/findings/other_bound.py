"""Finding `other-bound`: every rank spends much of its steps in code of no known phase, with the place of that code."""

from __future__ import annotations

from dataclasses import dataclass

from ddpobs import wire
from ddpobs.shared.quantities import duration
from ddpobs.shared.words import percent
from ddpobs_server.analysis.causes.code_places import Places, places_in
from ddpobs_server.analysis.communication.processors import delayed_share
from ddpobs_server.analysis.evidence import MIN_STEPS, Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding, Gain, NotJudged, severity_of
from ddpobs_server.analysis.findings.processor_bound import processor_bound
from ddpobs_server.analysis.steps.phase_shares import mean_step_ns

CODES = ("other-bound",)
OTHER_SHARE = 0.2
"""Maximum share of the phase `other`, without copies, that is no finding."""
_OTHER = wire.PHASES.index("other")


@dataclass(frozen=True)
class OtherBoundFacts(Facts):
    """The phase `other`, and its code.

    Attributes:
        share: Lowest share of the phase over the ranks, without copies.
        looks: Looks that found the phase.
        places: Places with the most time, each with its looks and its share.
    """

    share: float
    looks: int
    places: list[dict[str, object]]


FACTS = (OtherBoundFacts,)


def other_bound(evidence: Evidence) -> Judgement:
    """Judge the phase `other` above 20 % of the steps on every rank; copies belong to `input-bound`."""
    if evidence.step_count < MIN_STEPS:
        return [NotJudged("other-bound", f"fewer than {MIN_STEPS} steps")]
    locations = places_in("other", evidence.pulses.values())
    share = float(evidence.phase_shares[:, _OTHER].min()) * (1 - locations.copy_share)
    if share <= OTHER_SHARE:
        return []
    step_ns = mean_step_ns(evidence.rank, evidence.steps)
    waits_ns = (
        step_ns * (delayed_share(evidence) or 0.0)
        if any(isinstance(each, Finding) for each in processor_bound(evidence))
        else 0.0
    )
    gain = _gain(locations, share, step_ns, waits_ns)
    return [
        Finding(
            code="other-bound",
            severity=severity_of(gain.ratio) if gain else "info",
            verdict=f"Code outside of all phases takes {percent(share)} of every step",
            measure=f"{duration(share * step_ns)} of {duration(step_ns)} a step on every rank",
            cause=_cause(locations)
            + (f"; all code waits {duration(waits_ns)} a step for a processor" if waits_ns else ""),
            remedy=_remedy(locations),
            steps=evidence.step_range,
            phase="other",
            evidence=OtherBoundFacts(round(share, 4), locations.in_phase, locations.listed()),
            gain=gain,
        )
    ]


def _cause(locations: Places) -> str:
    if not locations.is_judged:
        return f"not known: only {locations.in_phase} looks found that code"
    location = locations.largest
    if not location.text:
        return "not known: places of code are not sent (DDPOBS_TRACEBACK=0)"
    return f"{location} takes {percent(locations.share(location))} of that time, by {locations.in_phase} looks"


def _remedy(locations: Places) -> str:
    if not locations.is_judged or not locations.largest.text:
        return (
            "Find the code between the optimizer's step and the next forward: logging, metrics, batches of one's own."
        )
    return "Do this work less often, on a thread, or after the next forward has been queued; or make it cheaper."


def _gain(locations: Places, share: float, step_ns: float, waits_ns: float) -> Gain | None:
    """Return the time of which the looks make 95 % sure that the place with the most of it has it.

    So the gain does not exceed the time at that place. Its error is the standard error of the place's share. Time
    without a processor is not the place's own, and less of it is not known to be saved.
    """
    if not locations.is_judged:
        return None
    location = locations.largest
    if not location.text:
        return None
    saved_ns = share * locations.least_share(location) * step_ns - waits_ns
    error = round(locations.error_ratio(location), 4)
    return Gain(round(saved_ns), round(saved_ns / step_ns, 4), error) if saved_ns > 0 else None
