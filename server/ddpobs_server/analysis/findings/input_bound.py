"""Finding `input-bound`: training waits for the next batch, or copies it to the device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from ddpobs import wire
from ddpobs.shared.quantities import duration
from ddpobs.shared.words import percent
from ddpobs_server.analysis.causes.code_places import COPIES, Places, places_in
from ddpobs_server.analysis.causes.input_cause import InputCause, InputUse, cause_of
from ddpobs_server.analysis.evidence import MIN_STEPS, Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding, NotJudged, severity_of
from ddpobs_server.analysis.steps.joined_steps import Floats
from ddpobs_server.analysis.steps.phase_shares import mean_step_ns

CODES = ("input-bound",)
DATA_SHARE = 0.3
"""Maximum share of the data phase that is no finding."""
COPY_SHARE = 0.2
"""Maximum share of copies in the phase `other` that is no finding."""
_DATA, _EXPOSED, _OTHER = map(wire.PHASES.index, ("data", "exposed_comm", "other"))
_PIN = "Set pin_memory=True on the loader and copy with non_blocking=True; convert types after the copy, on the device."


@dataclass(frozen=True)
class InputBoundFacts(Facts):
    """The cause, the shares of the phases, and the counts that the cause rests on; the others are None.

    Attributes:
        cause: Name of the cause; `unknown` if there is none.
        shares: Share of each phase.
        places: Places of the code, with the looks that found each; None if they do not show the cause.
        looks: All looks in the phase; None if they do not show the cause.
        batches: Batches that the loaders served; None for another cause.
        iterators: Iterators of the loaders; None for another cause.
        starting_share: Share of starting and closing iterators in the loaders' time; None for another cause.
        collating_share: Share of `collate_fn` in it; None for another cause.
        worker: Number of the slow worker; None for another cause.
        alone_share: Share of the waiting that is for it alone; None for another cause.
        workers: Workers of a rank's loader, the fewest of all ranks; None for another cause.
        needed_workers: Workers that would keep up; None for another cause.
        batch_ns: Time that a batch takes of a worker; None for another cause.
        processors: Processors for each rank; None for another cause.
    """

    cause: str
    shares: dict[str, float]
    places: list[dict[str, object]] | None = None
    looks: int | None = None
    batches: int | None = None
    iterators: int | None = None
    starting_share: float | None = None
    collating_share: float | None = None
    worker: int | None = None
    alone_share: float | None = None
    workers: int | None = None
    needed_workers: int | None = None
    batch_ns: int | None = None
    processors: int | None = None


FACTS = (InputBoundFacts,)


def input_bound(evidence: Evidence) -> Judgement:
    """Judge the data phase on the lower median rank: above 30 % of its steps, and the longest phase of its own.

    Exposed communication is no phase of its own: a rank whose batch has come waits there for the others' batches.
    """
    if evidence.step_count < MIN_STEPS:
        return [NotJudged("input-bound", f"fewer than {MIN_STEPS} steps")]
    shares = evidence.phase_shares
    # Of two ranks both must wait for data: a single waiting rank is a straggler.
    by_data = shares[np.argsort(shares[:, _DATA])]
    median, upper_median = by_data[(len(shares) - 1) // 2], by_data[len(shares) // 2]
    if median[_DATA] > DATA_SHARE and np.delete(median, _EXPOSED).max() == median[_DATA]:
        return _data_findings(evidence, median, float(upper_median[_DATA]))
    return _copy_findings(evidence, shares)


def _data_findings(evidence: Evidence, shares: Floats, pace: float) -> Judgement:
    """Return the finding.

    Args:
        evidence: Facts of the attempt.
        shares: Shares of the phases on the lower median rank.
        pace: Share of data on the upper median rank, which the others wait for.
    """
    share, step_ns = float(shares[_DATA]), mean_step_ns(evidence.rank, evidence.steps)
    pace_ns = pace * step_ns
    use = InputUse(
        inputs=[pulse.input for pulse in evidence.pulses.values() if pulse.input is not None],
        places=places_in("data", evidence.pulses.values()),
        data_ns=pace_ns,
        rest_ns=step_ns - pace_ns,
        ranks_per_host=max(Counter(evidence.hosts.values()).values(), default=max(1, evidence.world_size)),
    )
    cause = cause_of(use)
    if cause is None:
        return [
            _finding(
                evidence,
                shares,
                share,
                InputCause("unknown", "not known: no rank has reported its use of loaders", _UNKNOWN_REMEDY),
            ),
            NotJudged("input-bound", "the cause is not known: no rank has reported its use of loaders"),
        ]
    return [_finding(evidence, shares, share, cause, step_ns)]


_UNKNOWN_REMEDY = "Profile the loader: whether it needs more workers (num_workers) or cheaper samples is not known."


def _copy_findings(evidence: Evidence, shares: Floats) -> Judgement:
    locations = places_in("other", evidence.pulses.values())
    copying = float(shares[:, _OTHER].min()) * locations.copy_share
    if copying <= COPY_SHARE:
        return []
    lowest = shares[shares[:, _OTHER].argmin()]
    return [_finding(evidence, lowest, copying, _copy_cause(locations))]


def _copy_cause(locations: Places) -> InputCause:
    location = next(location for location, _ in locations.times_ns.most_common() if location.calls in COPIES)
    return InputCause(
        "copy",
        f"most often at {location}; a copy from pageable memory also waits for the device's earlier work",
        _PIN,
        evidence={"places": locations.listed(), "looks": locations.in_phase},
    )


def _finding(evidence: Evidence, shares: Floats, share: float, cause: InputCause, step_ns: float = 0.0) -> Finding:
    copies = cause.name == "copy"
    activity = "Copying or converting batches" if copies else "Waiting for data"
    mean_ns = mean_step_ns(evidence.rank, evidence.steps)
    return Finding(
        code="input-bound",
        severity=severity_of(share),
        verdict=f"{activity} takes {percent(share)} of the steps' time",
        measure=f"{duration(share * mean_ns)} of {duration(mean_ns)} a step",
        cause=cause.words,
        remedy=cause.remedy,
        steps=evidence.step_range,
        phase="other" if copies else "data",
        evidence=InputBoundFacts(
            cause=cause.name,
            shares={p: round(float(s), 4) for p, s in zip(wire.PHASES, shares, strict=True)},
            **cause.evidence,
        ),
        gain=cause.gain(step_ns) if step_ns else None,
    )
