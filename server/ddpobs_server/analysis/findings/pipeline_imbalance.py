"""Finding `pipeline-imbalance`: a stage of a pipeline computes longer than the others, which wait for it.

It names the stage, its excess per micro-batch, and the saving if one of its layers moved to a neighbour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ddpobs import wire
from ddpobs.shared.quantities import duration
from ddpobs.shared.words import format_ranks, percent
from ddpobs.whatif.schedule import predicted_schedule_ns
from ddpobs_server.analysis.evidence import MIN_STEPS, Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding, Gain, NotJudged, severity_of
from ddpobs_server.analysis.steps.pipeline import StageTimes, expected_bubble, stage_times

CODES = ("pipeline-imbalance",)
EXCESS_SHARE = 0.1
"""Excess of a stage over the mean of the others, as a share of that mean, that is no finding."""
MIN_SAVING = 0.03
"""Minimum share of the step that equal stages would save."""
_MAX_LISTED = 20


@dataclass(frozen=True)
class StageFacts:
    """Times of one stage in a step.

    Attributes:
        stages: Indices of the stages on these ranks.
        ranks: The first of the ranks.
        computing_ns: Forward and backward of all micro-batches.
        wait_ns: Waits for messages.
        bubble: Share of the waits in the schedule's step.
    """

    stages: list[int]
    ranks: list[int]
    computing_ns: int
    wait_ns: int
    bubble: float


@dataclass(frozen=True)
class PipelineImbalanceFacts(Facts):
    """Times of the stages and of the schedule.

    Attributes:
        stages: Times of each stage.
        expected_bubble: Bubble of equal stages; null for schedules without a formula.
        micro_batches: Micro-batches of a step.
        layers: Layers of the slow stage; None if no move helps.
        moved_to: Stages that would take one of them; None if no move helps.
        balanced_saves_ns: Saving of a step if all stages computed equally long.
        schedule_ns: Measured step of the schedule.
        predicted_schedule_ns: The same as predicted.
        step_ns: Median step.
        steps_used: Number of steps.
    """

    stages: list[StageFacts]
    expected_bubble: float | None
    micro_batches: int
    layers: int | None
    moved_to: list[int] | None
    balanced_saves_ns: int
    schedule_ns: int
    predicted_schedule_ns: int
    step_ns: int
    steps_used: int


FACTS = (PipelineImbalanceFacts,)


class _Move(NamedTuple):
    """One layer of the slow stage moved to a neighbour."""

    layers: int
    to: StageTimes
    saved_ns: float


def pipeline_imbalance(evidence: Evidence) -> Judgement:
    """Judge the stage that computes longest: more than 10 % above the others' mean, where equal stages would pay."""
    if not evidence.stages:
        return []
    times = stage_times(evidence.stages, evidence.rank, evidence.steps)
    fewest = min((own.steps for own in times), default=0)
    if fewest < MIN_STEPS:
        return [NotJudged("pipeline-imbalance", f"{fewest} of {MIN_STEPS} steps of a schedule on every stage")]
    slow = max(times, key=lambda own: own.computing_ns)
    others_ns = float(np.mean([own.computing_ns for own in times if own is not slow]))
    if slow.computing_ns <= (1 + EXCESS_SHARE) * others_ns:
        return []
    finding = _finding(evidence, times, slow, others_ns)
    return [] if finding is None else [finding]


def _finding(evidence: Evidence, times: Sequence[StageTimes], slow: StageTimes, others_ns: float) -> Finding | None:
    """Return the finding; None if equal stages would not pay."""
    micro_batches, slots = slow.stage.micro_batches, len(slow.stage.held) * slow.stage.micro_batches
    computing_ns = [own.computing_ns for own in times]
    predicted_ns = predicted_schedule_ns(computing_ns, slots)
    balanced_ns = predicted_schedule_ns([float(np.mean(computing_ns))] * len(times), slots)
    move = _best_move(evidence, times, slow, slots)
    step_ns = float(np.median([own.step_ns for own in times]))
    if predicted_ns - balanced_ns < MIN_SAVING * step_ns:
        return None
    measured_ns = float(np.median([own.schedule_ns for own in times]))
    excess_ns = slow.computing_ns - others_ns
    expected = expected_bubble([own.stage for own in times])
    return Finding(
        code="pipeline-imbalance",
        severity=severity_of((predicted_ns - balanced_ns) / step_ns),
        verdict=f"The pipeline waits for {slow.stage.name}",
        measure=f"{duration(slow.computing_ns / micro_batches)} of computation per micro-batch, "
        f"{duration(excess_ns / micro_batches)} ({percent(excess_ns / others_ns)}) more than the other stages",
        cause="not known: more layers and a slower device look alike",
        where=evidence.where(slow.stage.ranks, format_ranks(slow.stage.ranks)),
        remedy=_remedy(slow, move),
        steps=evidence.step_range,
        ranks=list(slow.stage.ranks),
        evidence=PipelineImbalanceFacts(
            stages=[_facts(own) for own in times],
            expected_bubble=None if expected is None else round(expected, 4),
            micro_batches=micro_batches,
            layers=None if move is None else move.layers,
            moved_to=None if move is None else list(move.to.stage.held),
            balanced_saves_ns=round(predicted_ns - balanced_ns),
            schedule_ns=round(measured_ns),
            predicted_schedule_ns=round(predicted_ns),
            step_ns=round(step_ns),
            steps_used=min(own.steps for own in times),
        ),
        gain=None if move is None or move.saved_ns <= 0 else _gain(move, step_ns, abs(predicted_ns - measured_ns)),
    )


def _best_move(evidence: Evidence, times: Sequence[StageTimes], slow: StageTimes, slots: int) -> _Move | None:
    """Return the move of one layer to the neighbour that computes least; None if the layers are not known.

    All layers of the stage are taken to compute equally long.
    """
    layers = len(_layers(evidence, slow))
    adjacent = {index + side for index in slow.stage.held for side in (-1, 1)}
    neighbours = [own for own in times if own is not slow and adjacent & set(own.stage.held)]
    if layers < 1 or not neighbours:
        return None
    to = min(neighbours, key=lambda own: own.computing_ns)
    layer_ns = slow.computing_ns / layers
    change = {id(slow): -layer_ns, id(to): layer_ns}
    after_ns = [own.computing_ns + change.get(id(own), 0.0) for own in times]
    before_ns = [own.computing_ns for own in times]
    return _Move(layers, to, predicted_schedule_ns(before_ns, slots) - predicted_schedule_ns(after_ns, slots))


def _layers(evidence: Evidence, slow: StageTimes) -> set[tuple[int, str]]:
    """Return the layers of a stage: (module, name), from the names of the parameters."""
    if evidence.columns is None or evidence.world_size < 1:
        return set()
    latest: dict[int, wire.Layout] = {}
    for layout in evidence.columns.layouts():
        if layout.module % evidence.world_size == slow.stage.ranks[0]:
            latest[layout.module] = layout
    return {
        (module, layer_of(parameter.name))
        for module, layout in latest.items()
        for bucket in layout.buckets
        for parameter in bucket.parameters
    }


def layer_of(parameter: str) -> str:
    """Return the layer of a parameter: its name up to the first number, as `layers.3` of `layers.3.attention.weight`.

    Without a number it is the module that owns the parameter.
    """
    parts = parameter.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1])


def _remedy(slow: StageTimes, move: _Move | None) -> str:
    divide = f"Divide {slow.stage.name} into smaller layers, and give all stages equal computation"
    if move is None:
        return f"{divide}: its layers are not known."
    one = f"one of its {move.layers} layers"
    if move.saved_ns <= 0:
        return f"{divide}: to move {one} to {move.to.stage.name} would save nothing."
    return f"Move {one} to {move.to.stage.name}, and measure again."


def _gain(move: _Move, step_ns: float, error_ns: float) -> Gain:
    """Return the saving; its error is the prediction's for the schedule as it is, against the measured time."""
    return Gain(
        step_ns=round(move.saved_ns),
        ratio=round(move.saved_ns / step_ns, 4),
        error_ratio=round(error_ns / move.saved_ns, 4),
    )


def _facts(own: StageTimes) -> StageFacts:
    return StageFacts(
        stages=list(own.stage.held),
        ranks=list(own.stage.ranks)[:_MAX_LISTED],
        computing_ns=round(own.computing_ns),
        wait_ns=round(own.receive_wait_ns + own.send_wait_ns),
        bubble=round(own.bubble, 4),
    )
