"""Finding `growing-steps`: all ranks' steps become longer and longer, as with a list that grows in each step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddpobs import wire
from ddpobs.shared.quantities import duration
from ddpobs.shared.words import percent
from ddpobs_server.analysis.causes.code_places import places_in
from ddpobs_server.analysis.evidence import Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding, severity_of
from ddpobs_server.analysis.slow_ranks.lateness import mean_gain
from ddpobs_server.analysis.steps.joined_steps import Floats, JoinedSteps
from ddpobs_server.analysis.steps.shared_time import shared_ns

CODES = ("growing-steps",)
GROWTH = 0.2
"""Maximum growth of the step time, as a share of the first eighth's, that is no finding."""
MIN_STEPS = 64
_PARTS = 8
_MIN_RISE, _MAX_RISE = 0.04, 0.5
"""Minimum and maximum part of the growth from one eighth to the next. A single jump is a change, and no growth."""
_RISES = 5
"""Minimum number of such rises, of seven; the others may be smaller."""
_LARGEST_FALL = 0.1
_AS_BATCHES = 0.5
"""Minimum growth of the batches, as a part of the steps' growth, that explains it."""
_IN_CODE = ("data", "other")


@dataclass(frozen=True)
class GrowingStepsFacts(Facts):
    """How the steps grow.

    Attributes:
        cause: `batches`, `place`, or `not-known`.
        levels_ns: Median step of each eighth of the steps.
        phase_growth_ns: Growth of each phase, from the first eighth to the last.
        steps_used: Number of steps.
    """

    cause: str
    levels_ns: list[int]
    phase_growth_ns: dict[str, int]
    steps_used: int


FACTS = (GrowingStepsFacts,)


def growing_steps(evidence: Evidence) -> Judgement:
    """Judge the time that the ranks of a step share; a single rank that becomes slower is a straggler."""
    joined = evidence.joined if evidence.whole is None else evidence.whole
    if evidence.separate_groups_reason or len(joined) < MIN_STEPS:
        return []
    levels_ns = _levels(shared_ns(joined))
    return [_finding(evidence, joined, levels_ns)] if _grows(levels_ns) else []


def _levels(values: Floats) -> Floats:
    """Return the medians of eighths of the steps."""
    return np.array([np.median(part, axis=0) for part in np.array_split(values, _PARTS)])


def _grows(levels: Floats) -> bool:
    growth = levels[-1] - levels[0]
    if growth <= GROWTH * levels[0]:
        return False
    rises = np.diff(levels) / growth
    often = int((rises >= _MIN_RISE).sum()) >= _RISES
    return bool(often and rises.max() <= _MAX_RISE and rises.min() >= -_LARGEST_FALL)


def _finding(evidence: Evidence, joined: JoinedSteps, levels_ns: Floats) -> Finding:
    phases_ns = _levels(joined.lower_median_phases_ns)
    growth_ns = phases_ns[-1] - phases_ns[0]
    phase = wire.OWN_PHASES[int(growth_ns.argmax())]
    cause, words = _cause(evidence, phase)
    gain = mean_gain(joined, np.clip(shared_ns(joined) - levels_ns[0], 0.0, None))
    return Finding(
        code="growing-steps",
        severity="info" if cause == "batches" else severity_of(gain.ratio),
        verdict="The steps of all ranks become longer",
        measure=f"from {duration(levels_ns[0])} to {duration(levels_ns[-1])} a step, "
        f"{duration(growth_ns.max())} of it in {phase}",
        when=f"steps {joined.step[0]} to {joined.step[-1]}",
        cause=words,
        remedy=_BATCHES_REMEDY if cause == "batches" else _REMEDIES[phase],
        steps=(int(joined.step[0]), int(joined.step[-1])),
        phase=phase,
        evidence=GrowingStepsFacts(
            cause=cause,
            levels_ns=[round(ns) for ns in levels_ns.tolist()],
            phase_growth_ns=dict(zip(wire.OWN_PHASES, map(round, growth_ns.tolist()), strict=True)),
            steps_used=len(joined),
        ),
        gain=None if cause == "batches" else gain,
    )


def _cause(evidence: Evidence, phase: str) -> tuple[str, str]:
    """Return the name of the cause, and its words; `phase` is the one that grows most."""
    if (ratio := _growth_of_batches(evidence)) is not None:
        return "batches", f"the batches grow too: {ratio:.2f} times the elements at the end"
    places = places_in(phase, evidence.pulses.values())
    if phase in _IN_CODE and places.is_judged and places.largest.text:
        place = places.largest
        return "place", f"{place} takes {percent(places.share(place))} of the time in {phase}"
    return "not-known", "not known: no line of code was seen that does it"


def _growth_of_batches(evidence: Evidence) -> float | None:
    """Return how often the last batches hold the elements of the first, in the latest steps, if that explains them.

    None if the batches are not recorded, or grow less than half as much as the steps.
    """
    joined = evidence.joined
    if not joined.row.size or len(joined) < MIN_STEPS:
        return None
    elements = evidence.steps.elements[joined.row]
    batches, steps_ns = _levels(elements.sum(axis=1).astype(np.float64)), _levels(shared_ns(joined))
    if elements.min() <= 0 or batches[-1] <= batches[0]:
        return None
    growth = max(GROWTH, steps_ns[-1] / steps_ns[0] - 1)
    ratio = float(batches[-1] / batches[0])
    return ratio if ratio - 1 >= _AS_BATCHES * growth else None


_KEPT = "Look for what this code keeps from step to step"
_REMEDIES = {
    "data": f"{_KEPT}: an iterator that begins anew and skips, a cache that is searched.",
    "forward": "Look for state that grows in the model: a cache of keys and values, a history of tensors.",
    "backward": "Look for a graph that is kept from step to step: a loss or a state that is not detached.",
    "optimizer": "Look for parameters or state that are added to the optimizer in each step.",
    "other": f"{_KEPT}: a list of results, metrics over all steps so far, a log that is written anew.",
}
_BATCHES_REMEDY = "If the batches are meant to grow, this is no fault."
