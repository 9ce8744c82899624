"""Stages of a pipeline: their computation, their bubble, and the part of their all-reduce that delays a step.

A rank's *bubble* is the time in which it waits for messages of other stages during a schedule's step. The last stage
has done its backward before the first stage. In the next step it waits longer for its first receive, so that a step of
the schedule, from call to return, holds one bubble on every stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ddpobs import wire
from ddpobs.whatif.pipeline import pipeline_slowdown
from ddpobs.whatif.repair import Slowdown
from ddpobs.whatif.schedule import predicted_schedule_ns
from ddpobs.wire.facts import PipelineFacts, facts_of
from ddpobs_server.analysis.steps.joined_steps import Floats, JoinedSteps
from ddpobs_server.analysis.steps.rank_groups import RankGroup

EVENT = "pipeline"
"""Kind of the event by which a rank reports its schedule."""
_EQUAL_STAGES = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B")
"""Schedules whose bubble follows the formula of `expected_bubble`."""
_REPLAYED = ("ScheduleGPipe", "Schedule1F1B", "Megatron")
"""Schedules whose order of operations is replayed, with one stage on each rank; Megatron's is 1F1B."""
_HIDDEN_NS = 200_000
"""Minimum wait for the next step's first receive that shows that the earlier stages were still at work."""


@dataclass(frozen=True)
class Stage:
    """Ranks that hold the same stages of a pipeline: replicas, over which DDP reduces gradients.

    Attributes:
        schedule: Class of the schedule.
        stages: Number of stages of the whole pipeline.
        held: Indices of the stages on these ranks.
        micro_batches: Micro-batches of a step.
        ranks: The replicas, in rising order.
    """

    schedule: str
    stages: int
    held: tuple[int, ...]
    micro_batches: int
    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        """The stages in words: `stage 1`, or `stages 0 and 2`."""
        numbers = " and ".join(map(str, self.held))
        return f"stage {numbers}" if len(self.held) == 1 else f"stages {numbers}"

    @property
    def members(self) -> str:
        """Its ranks in words."""
        return f"replicas of {self.name}"


def stages_of(events: Iterable[tuple[int, wire.Event]]) -> list[Stage]:
    """Return the stages that ranks reported, by their first index; empty without a pipeline, or if reports disagree.

    Args:
        events: (rank, event).
    """
    replicas: dict[tuple[str, int, int, tuple[int, ...]], set[int]] = {}
    for rank, event in events:
        if event.kind == EVENT and (facts := _facts(event)) is not None:
            replicas.setdefault(facts, set()).add(rank)
    found = [
        Stage(schedule, stages, held, micro_batches, tuple(sorted(ranks)))
        for (schedule, stages, micro_batches, held), ranks in replicas.items()
    ]
    found.sort(key=lambda stage: stage.held)
    held = sorted(index for stage in found for index in stage.held)
    is_whole = len(found) > 1 and len(held) == found[0].stages and held == list(range(len(held)))
    return found if is_whole else []


def _facts(event: wire.Event) -> tuple[str, int, int, tuple[int, ...]] | None:
    """Return schedule, stages, micro-batches and held stages; None if they do not describe a schedule."""
    facts = facts_of(event, PipelineFacts)
    if facts.micro_batches < 1 or not facts.held:
        return None
    return facts.schedule, facts.stages, facts.micro_batches, facts.held_stages


def expected_bubble(stages: Sequence[Stage]) -> float | None:
    """Return the bubble's share of a step if all stages compute equally long; None for a schedule without a formula.

    With p ranks in a pipeline, m micro-batches and v stages on each rank it is (p - 1) / (v m + p - 1).

    Source: GPipe (arXiv 1811.06965, section 2.3) for v = 1; Megatron-LM (arXiv 2104.04473, section 2.2), which divides
    the bubble by the ideal time instead, for 1F1B and interleaved stages.
    """
    first = stages[0]
    if first.schedule not in _EQUAL_STAGES or len({len(stage.held) for stage in stages}) > 1:
        return None
    slots = len(first.held) * first.micro_batches
    return (len(stages) - 1) / (slots + len(stages) - 1)


@dataclass(frozen=True)
class StageTimes:
    """Times of one stage in a step: medians over the steps, and the lower median or the mean over the replicas.

    Attributes:
        stage: The stage.
        schedule_ns: The schedule's step, from call to return; mean over the replicas.
        computing_ns: Forward and backward of all micro-batches. Lower median over the replicas, because a single slow
            replica is a straggler.
        receive_wait_ns: Waits for messages; mean over the replicas.
        send_wait_ns: Waits until a message was taken; mean over the replicas.
        bubble: Share of both waits in the schedule's step; mean over the replicas.
        step_ns: The whole training step.
        steps: Steps that were used, of the replica with the fewest.
    """

    stage: Stage
    schedule_ns: float
    computing_ns: float
    receive_wait_ns: float
    send_wait_ns: float
    bubble: float
    step_ns: float
    steps: int


def stage_times(stages: Sequence[Stage], rank: wire.Ints, steps: wire.Steps) -> list[StageTimes]:
    """Return each stage's times; empty if a stage has no usable step.

    A step without a clean start is left out: in the first one torch also sets the pipeline up.

    Args:
        stages: The stages.
        rank: Rank of each row, shape [rows].
        steps: Columns, each of shape [rows].
    """
    usable = (steps.schedule_ns > 0) & ((steps.flags & wire.NO_ORIGIN) == 0) & (steps.send_wait_ns >= 0)
    times = []
    for stage in stages:
        replicas = [_medians(steps.select(usable & (rank == number))) for number in stage.ranks]
        if not all(len(replica) for replica in replicas):
            return []
        table = np.array([list(replica.values()) for replica in replicas])
        mean = dict(zip(replicas[0], table.mean(axis=0).tolist(), strict=True))
        computing_ns = sorted(table[:, 0].tolist())[(len(table) - 1) // 2]
        mean["steps"] = int(table[:, -1].min())
        times.append(StageTimes(stage, **(mean | {"computing_ns": computing_ns})))
    return times


def _medians(steps: wire.Steps) -> dict[str, float]:
    """Return the medians of one rank's steps; empty without a step."""
    if not len(steps):
        return {}
    columns = {
        "computing_ns": steps.computing_ns,
        "schedule_ns": steps.schedule_ns,
        "receive_wait_ns": steps.receive_wait_ns,
        "send_wait_ns": steps.send_wait_ns,
        "bubble": (steps.receive_wait_ns + steps.send_wait_ns) / steps.schedule_ns,
        "step_ns": steps.end_ns - steps.start_ns,
    }
    return {name: float(np.median(values)) for name, values in columns.items()} | {"steps": len(steps)}


def within_parts(joined: JoinedSteps, parts: Sequence[Stage] | Sequence[RankGroup]) -> JoinedSteps:
    """Return the steps as if all stages, or all process groups, computed equally long: only ranks of one part differ.

    The part's lower median is subtracted from each rank's own time, and that of all ranks is added. Without parts, or
    if a rank is in none, the steps stay as they are.
    """
    if not parts or not set(joined.ranks.tolist()) <= {rank for part in parts for rank in part.ranks}:
        return joined
    own_ns, phases_ns = joined.own_ns.copy(), joined.phases_ns.copy()
    for part in parts:
        columns = np.flatnonzero(np.isin(joined.ranks, part.ranks))
        if len(columns):
            own_ns[:, columns] -= _lower_median(joined.own_ns[:, columns])
            phases_ns[:, columns] -= _lower_median(joined.phases_ns[:, columns])
    own_ns += _lower_median(joined.own_ns)
    phases_ns += _lower_median(joined.phases_ns)
    return replace(joined, own_ns=np.maximum(0.0, own_ns), phases_ns=phases_ns)


def slowdown_of(stages: Sequence[Stage], joined: JoinedSteps) -> Slowdown | None:
    """Return what slow ranks of a pipeline cost; None without a schedule and steps that can be replayed.

    `by_rank` is in the order of `joined.ranks`, `by_phase` the forward's and the backward's.
    """
    if not stages or not len(joined) or stages[0].schedule not in _REPLAYED:
        return None
    if any(len(stage.held) > 1 or len(stage.ranks) != len(stages[0].ranks) for stage in stages):
        return None
    ranks = np.array([stage.ranks for stage in stages]).T
    if not np.array_equal(np.sort(ranks, axis=None), joined.ranks):
        return None
    own_ns = joined.phases_ns[:, np.searchsorted(joined.ranks, ranks)]
    forward_ns, backward_ns = (own_ns[..., wire.OWN_PHASES.index(phase)] for phase in ("forward", "backward"))
    is_gpipe = stages[0].schedule == "ScheduleGPipe"
    slowdown = pipeline_slowdown(forward_ns, backward_ns, stages[0].micro_batches, forwards_first=is_gpipe)
    return replace(slowdown, by_rank=slowdown.by_rank.reshape(-1)[np.argsort(ranks, axis=None)])


def _lower_median(values: Floats) -> Floats:
    """Return the lower median over axis 1, which stays."""
    middle = (values.shape[1] - 1) // 2
    return np.asarray(np.partition(values, middle, axis=1)[:, middle, None])


@dataclass(frozen=True)
class Reduction:
    """A stage's all-reduce in a step, in ns: medians over the steps, mean over the replicas.

    Attributes:
        reduce_ns: From the first launch to the last completion, without gaps.
        wait_ns: Training waited for it.
        exposed_ns: Part of the wait that delayed the pipeline: no earlier stage was still at work.
    """

    reduce_ns: float
    wait_ns: float
    exposed_ns: float

    @property
    def overlap(self) -> float | None:
        """Share of the all-reduce beside which this stage or an earlier one worked; None without an all-reduce."""
        return None if self.reduce_ns <= 0 else max(0.0, 1 - self.exposed_ns / self.reduce_ns)


@dataclass(frozen=True)
class RankColumns:
    """Columns of one rank, sorted by step.

    Attributes:
        steps: Its steps.
        spans: Its bucket spans.
        comms: Its other communication.
        blocks_sends: Its reducer waits inside backward, before the gradients are sent to the earlier stage.
    """

    steps: wire.Steps
    spans: wire.Spans
    comms: wire.Comms
    blocks_sends: bool = field(default=False)


def reduction(stage: Stage, replicas: Sequence[RankColumns]) -> Reduction | None:
    """Measure the overlap of a stage's all-reduce with the rest of the schedule; None without usable steps.

    A rank that has waited for its buckets may still have to wait for the next step's first receive: the earlier stages
    were at work, and the all-reduce delayed nothing. The wait of the first stage, which ends last, is always exposed.
    """
    rows = [row for columns in replicas if (row := _reduction_of(stage, columns)) is not None]
    return Reduction(*np.mean(rows, axis=0).tolist()) if rows else None


def _reduction_of(stage: Stage, columns: RankColumns) -> Floats | None:
    steps, spans = columns.steps, columns.spans
    if not len(steps) or not len(spans):
        return None
    order = np.argsort(steps.step, kind="stable")
    steps = steps.select(order)
    reduce_ns = np.zeros(len(steps))
    for row, number in enumerate(steps.step.tolist()):
        own = spans.step == number
        reduce_ns[row] = covered_ns(spans.launched_ns[own], spans.done_ns[own])
    wait_ns = np.maximum(0, steps.exposed_comm_ns - steps.send_wait_ns - steps.receive_wait_ns)
    exposed_ns = wait_ns.astype(np.float64)
    if 0 not in stage.held and not columns.blocks_sends:
        exposed_ns[:-1][_first_receive_ns(steps, columns.comms)[1:] >= _HIDDEN_NS] = 0.0
    usable = (steps.schedule_ns > 0) & ((steps.flags & wire.NO_ORIGIN) == 0) & (reduce_ns > 0)
    usable[-1] = False  # The next step's first receive is not known.
    if not usable.any():
        return None
    return np.asarray([np.median(values[usable]) for values in (reduce_ns, wait_ns, exposed_ns)])


def _first_receive_ns(steps: wire.Steps, comms: wire.Comms) -> wire.Ints:
    """Return the wait for the first receive of each step, shape [steps]; 0 without one."""
    received = comms.select(comms.kind == wire.COMM_KINDS.index("receive"))
    received = received.select(np.lexsort((received.launched_ns, received.step)))
    numbers, first = np.unique(received.step, return_index=True)
    waits_ns = np.zeros(len(steps), np.int64)
    row = np.searchsorted(steps.step, numbers)
    known = row < len(steps)
    known[known] = steps.step[row[known]] == numbers[known]
    waits_ns[row[known]] = (received.done_ns - received.launched_ns)[first[known]]
    return waits_ns


def covered_ns(begin_ns: wire.Ints, end_ns: wire.Ints) -> int:
    """Return the length of the union of intervals."""
    if not len(begin_ns):
        return 0
    order = np.argsort(begin_ns)
    begin_ns, end_ns = begin_ns[order], end_ns[order]
    reached_ns = np.append(begin_ns[0], np.maximum.accumulate(end_ns)[:-1])
    return int(np.maximum(0, end_ns - np.maximum(begin_ns, reached_ns)).sum())


def pipeline_json(
    times: Sequence[StageTimes], reductions: Sequence[Reduction | None], expected: float | None
) -> dict[str, Any]:
    """Return the pipeline in the form of the REST API."""
    first = times[0].stage
    return {
        "schedule": first.schedule,
        "stages": first.stages,
        "micro_batches": first.micro_batches,
        "expected_bubble": None if expected is None else round(expected, 4),
        "predicted_ns": round(
            predicted_schedule_ns([own.computing_ns for own in times], len(first.held) * first.micro_batches)
        ),
        "by_rank": [_stage_json(own, reduced) for own, reduced in zip(times, reductions, strict=True)],
    }


def _stage_json(own: StageTimes, reduced: Reduction | None) -> dict[str, Any]:
    return {
        "stages": list(own.stage.held),
        "ranks": list(own.stage.ranks),
        "steps": own.steps,
        "step_ns": round(own.step_ns),
        "schedule_ns": round(own.schedule_ns),
        "computing_ns": round(own.computing_ns),
        "receive_wait_ns": round(own.receive_wait_ns),
        "send_wait_ns": round(own.send_wait_ns),
        "bubble": round(own.bubble, 4),
        "reduce_ns": None if reduced is None else round(reduced.reduce_ns),
        "reduce_wait_ns": None if reduced is None else round(reduced.wait_ns),
        "reduce_exposed_ns": None if reduced is None else round(reduced.exposed_ns),
        "reduce_overlap": None if reduced is None or reduced.overlap is None else round(reduced.overlap, 4),
    }
