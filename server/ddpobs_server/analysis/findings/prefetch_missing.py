"""Finding `prefetch-missing`: training waits for all-gathers of units that an earlier launch would hide."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddpobs.shared.quantities import duration
from ddpobs.shared.words import bucket_title
from ddpobs_server.analysis.communication.unit_changes import hidden_ns
from ddpobs_server.analysis.communication.unit_steps import GATHERS, UnitSteps, unit_steps, unsteady_reason
from ddpobs_server.analysis.evidence import MAX_LISTED, Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding, Gain, NotJudged, advice_severity
from ddpobs_server.analysis.steps.joined_steps import Floats

CODES = ("prefetch-missing",)
_FORWARD, _BACKWARD = GATHERS
_REMEDIES = {
    _FORWARD: "Call set_modules_to_forward_prefetch([next_unit]) on each unit.",
    _BACKWARD: "Call set_modules_to_backward_prefetch([unit_before]) on each unit.",
}
_BLOCKING = (
    "Collectives block the computation on this device: begin each all-gather one unit earlier by "
    "unit.unshard(async_op=True), such as in a hook before the forward or backward of the unit before it."
)
_MEMORY = " A gathered unit takes its memory earlier."


@dataclass(frozen=True)
class PrefetchMissingFacts(Facts):
    """All-gathers that training waits for, and what an earlier launch hides; medians over the steps.

    Attributes:
        module: Number of the module.
        forward_exposed_ns: Wait for all-gathers in forward, without waiting for a late rank.
        backward_exposed_ns: The same in backward.
        saved_by_unit_ns: Predicted saving by the name of the collective.
        blocks: Whether one of these collectives blocks the thread that launches it.
        steps_used: Number of steps.
    """

    module: int
    forward_exposed_ns: int
    backward_exposed_ns: int
    saved_by_unit_ns: dict[str, int]
    blocks: bool
    steps_used: int


FACTS = (PrefetchMissingFacts,)


def prefetch_missing(evidence: Evidence) -> Judgement:
    """Judge the time that a step would save if each all-gather began when the one before it is done."""
    if not evidence.is_fully_shard or len(evidence.joined.ranks) < 2:
        return []
    units = unit_steps(evidence)
    if isinstance(units, str):
        return [NotJudged("prefetch-missing", units)]
    saved_ns = hidden_ns(units)
    gain = units.gain(saved_ns.sum(axis=1))
    if gain is None:
        return []
    if reason := unsteady_reason(evidence, units):
        return [NotJudged("prefetch-missing", reason)]
    return [_finding(evidence, units, saved_ns, gain)]


def _finding(evidence: Evidence, units: UnitSteps, saved_ns: Floats, gain: Gain) -> Finding:
    typical_ns, exposed_ns = np.median(saved_ns, axis=0), np.median(units.exposed_ns, axis=0)
    of_kind = {kind: np.array([row.kind == kind for row in units.rows]) for kind in GATHERS}
    passes = [kind for kind in GATHERS if typical_ns[of_kind[kind]].any()]
    waited_ns = float(exposed_ns[of_kind[_FORWARD] | of_kind[_BACKWARD]].sum())
    most = int(typical_ns.argmax())
    places = np.flatnonzero(typical_ns > 0)
    titles = [bucket_title(units.module, int(units.index[place]), row) for place, row in enumerate(units.rows)]
    blocks = bool(units.blocks[places].any())
    where = {_FORWARD: "Forward", _BACKWARD: "Backward"}
    verdict = where[passes[0]] if len(passes) == 1 else "Training"
    return Finding(
        code="prefetch-missing",
        severity=advice_severity(gain),
        verdict=f"{verdict} waits for all-gathers that could begin earlier",
        measure=f"{duration(waited_ns)} a step in all-gathers, without waiting for a late rank",
        cause=f"{len(places)} all-gathers begin only after the computation before them"
        if not blocks
        else f"{len(places)} all-gathers block the computation that could hide them",
        where=titles[most],
        remedy=(_BLOCKING if blocks else " ".join(_REMEDIES[kind] for kind in passes)) + _MEMORY,
        steps=evidence.step_range,
        phase="exposed_comm",
        buckets=units.index[places].tolist()[:MAX_LISTED],
        parameters=[parameter.name for parameter in units.rows[most].parameters[:MAX_LISTED]],
        gain=gain,
        evidence=PrefetchMissingFacts(
            module=units.module,
            forward_exposed_ns=round(float(exposed_ns[of_kind[_FORWARD]].sum())),
            backward_exposed_ns=round(float(exposed_ns[of_kind[_BACKWARD]].sum())),
            saved_by_unit_ns={titles[place]: round(float(typical_ns[place])) for place in places[:MAX_LISTED]},
            blocks=blocks,
            steps_used=len(units.exposed_ns),
        ),
    )
