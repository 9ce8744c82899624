"""Finding `unit-size`: the units of a fully sharded model are too small for the link, or the model is a single one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ddpobs import wire
from ddpobs.shared.quantities import counted, duration, size_text
from ddpobs.whatif.link import Link
from ddpobs_server.analysis.communication.unit_changes import LIMITS_MB, links_of, merged_saving_ns, unit_sizes
from ddpobs_server.analysis.communication.unit_steps import UnitSteps, unit_steps, unsteady_reason
from ddpobs_server.analysis.evidence import MAX_LISTED, Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding, Gain, NotJudged, advice_severity
from ddpobs_server.analysis.steps.joined_steps import Floats

CODES = ("unit-size",)
PARTS = (2, 4, 8, 16)
"""Numbers of units into which the only one is divided."""
_NEARLY = 0.9
"""Share of the largest saving that the smallest change must reach: a large unit takes memory while it is gathered."""


@dataclass(frozen=True)
class UnitSizeFacts(Facts):
    """The present units, and what other sizes save.

    Attributes:
        kind: `small` or `large`.
        module: Number of the module.
        unit_bytes: Sizes of the units in the order of forward.
        collectives_a_step: Number of collectives in a step.
        exposed_ns: Time of a step in which training waits for moving bytes.
        latency_ns: Latency of a collective, by its kind.
        saved_ns: Predicted saving of a step by the change.
        steps_used: Number of steps.
    """

    kind: str
    module: int
    unit_bytes: list[int]
    collectives_a_step: int
    exposed_ns: int
    latency_ns: dict[str, int]
    saved_ns: dict[str, int]
    steps_used: int


FACTS = (UnitSizeFacts,)


def unit_size(evidence: Evidence) -> Judgement:
    """Judge the time that a step would save with fewer units, or with a single one divided."""
    if not evidence.is_fully_shard or len(evidence.joined.ranks) < 2:
        return []
    units = unit_steps(evidence)
    if isinstance(units, str):
        return [NotJudged("unit-size", units)]
    links, computing_ns = links_of(units), _computing_ns(evidence)
    merged = _gains(units, {f"up to {limit:g} MB": merged_saving_ns(units, links, 1e6 * limit) for limit in LIMITS_MB})
    divided = _gains(units, {f"{parts} units": divided_saving_ns(units, computing_ns, parts) for parts in PARTS})
    options = max(merged, divided, key=lambda gains: max((gain.step_ns for gain in gains.values()), default=0))
    if not options:
        return _unknown_latency(units, links)
    if reason := unsteady_reason(evidence, units):
        return [NotJudged("unit-size", reason)]
    return [_small(evidence, units, links, options) if options is merged else _large(evidence, units, links, options)]


def _unknown_latency(units: UnitSteps, links: Mapping[str, Link]) -> Judgement:
    """Say that latency is not known apart from the bytes' time, if merging the small units of one size might pay."""
    at_most = dict(links)
    for kind in {row.kind for row in units.rows}:
        if not links[kind].is_separated and links[kind].beta_ns:
            of_kind = [place for place, row in enumerate(units.rows) if row.kind == kind]
            at_most[kind] = Link(float(np.median(units.moving_ns[:, of_kind])), 0.0, is_separated=False)
    if units.gain(merged_saving_ns(units, at_most, 1e6 * LIMITS_MB[0])) is None:
        return []
    size = size_text(round(float(np.median(list(unit_sizes(units).values())))))
    reason = f"all units have about {size}: the latency of a collective is not known apart from the time of its bytes"
    return [NotJudged("unit-size", reason)]


def divided_saving_ns(units: UnitSteps, computing_ns: tuple[float, float], parts: int) -> Floats:
    """Return what dividing the only unit into equal ones would have saved in each step, shape [steps].

    All parts but the first are gathered beside the forward of the one before, and all but the last are reduced beside
    backward. There they are gathered again, all but the last of forward. What has no room beside the computation stays
    exposed. Where collectives block the computation, nothing is hidden; the latency of further parts is not known.

    Args:
        units: The collectives.
        computing_ns: Own time of forward and of backward in a typical step, of the fastest rank.
        parts: Number of units afterwards.
    """
    saved_ns = np.zeros(len(units.exposed_ns))
    if units.blocks.any() or len({row.unit for row in units.rows}) > 1:
        return saved_ns
    of_kind = {row.kind: units.exposed_ns[:, place] for place, row in enumerate(units.rows)}
    gathered_ns, scattered_ns = (of_kind.get(kind, saved_ns) for kind in ("all_gather", "reduce_scatter"))
    share = 1 - 1 / parts
    forward_ns, backward_ns = (share * time_ns for time_ns in computing_ns)
    in_forward_ns = gathered_ns / parts + np.maximum(0.0, share * gathered_ns - forward_ns)
    in_backward_ns = np.maximum(scattered_ns / parts, share * gathered_ns + scattered_ns - backward_ns)
    result: Floats = gathered_ns + scattered_ns - in_forward_ns - in_backward_ns
    return result


def _computing_ns(evidence: Evidence) -> tuple[float, float]:
    """Own time of forward and of backward in a typical step, of the fastest rank."""
    own_ns = np.median(evidence.joined.phases_ns.min(axis=1), axis=0)
    forward, backward = (float(own_ns[wire.OWN_PHASES.index(phase)]) for phase in ("forward", "backward"))
    return forward, backward


def _gains(units: UnitSteps, savings: Mapping[str, Floats]) -> dict[str, Gain]:
    found = {change: units.gain(saved_ns) for change, saved_ns in savings.items()}
    return {change: gain for change, gain in found.items() if gain is not None}


def _smallest(gains: Mapping[str, Gain]) -> str:
    """Return the first change that saves nearly as much as any."""
    most = max(gain.step_ns for gain in gains.values())
    return next(change for change, gain in gains.items() if gain.step_ns >= _NEARLY * most)


def _small(evidence: Evidence, units: UnitSteps, links: Mapping[str, Link], gains: Mapping[str, Gain]) -> Finding:
    sizes, change = list(unit_sizes(units).values()), _smallest(gains)
    count, typical = len(units.rows), float(np.median(sizes))
    latency_ns = sum(links[row.kind].alpha_ns for row in units.rows)
    return _finding(
        evidence,
        units,
        ("small", links, gains),
        gains[change],
        verdict="Larger units would make steps faster",
        measure=f"{counted(len(sizes), 'unit')} of about {size_text(round(typical))}, "
        f"{counted(count, 'collective')} a step",
        cause=f"the latency of these collectives is {duration(latency_ns)} a step",
        remedy=f"Apply fully_shard to groups of neighbouring modules, {change} each: fully_shard([a, b]). A larger "
        "unit takes more memory while it is gathered.",
    )


def _large(evidence: Evidence, units: UnitSteps, links: Mapping[str, Link], gains: Mapping[str, Gain]) -> Finding:
    change, row = _smallest(gains), units.rows[0]
    exposed_ns = float(np.median(units.exposed_ns.sum(axis=1)))
    return _finding(
        evidence,
        units,
        ("large", links, gains),
        gains[change],
        verdict="The model is a single unit, which no computation hides",
        measure=f"{size_text(row.size_bytes)}; training waits {duration(exposed_ns)} a step for it",
        cause="a unit is gathered whole before its first module computes, and reduced after its last",
        remedy=f"Apply fully_shard to the blocks of the model too, so that it becomes {change} of about equal size.",
        parameters=[parameter.name for parameter in row.parameters[:MAX_LISTED]],
    )


def _finding(
    evidence: Evidence,
    units: UnitSteps,
    facts: tuple[str, Mapping[str, Link], Mapping[str, Gain]],
    gain: Gain,
    *,
    parameters: list[str] | None = None,
    **words: str,
) -> Finding:
    kind, links, gains = facts
    return Finding(
        code="unit-size",
        severity=advice_severity(gain),
        steps=evidence.step_range,
        phase="exposed_comm",
        gain=gain,
        parameters=parameters or [],
        evidence=UnitSizeFacts(
            kind=kind,
            module=units.module,
            unit_bytes=list(unit_sizes(units).values()),
            collectives_a_step=len(units.rows),
            exposed_ns=round(float(np.median(units.exposed_ns.sum(axis=1)))),
            latency_ns={name: round(link.alpha_ns) for name, link in links.items()},
            saved_ns={change: each.step_ns for change, each in gains.items()},
            steps_used=len(units.exposed_ns),
        ),
        **words,  # type: ignore[arg-type]
    )
