"""Stages, bubbles and the overlap of a pipeline's all-reduce, from columns."""

from __future__ import annotations

import numpy as np
import pytest
from ddpobs_server.analysis.slow_ranks.lateness import lateness
from ddpobs_server.analysis.steps.joined_steps import join
from ddpobs_server.analysis.steps.pipeline import (
    RankColumns,
    Stage,
    expected_bubble,
    reduction,
    slowdown_of,
    stage_times,
    stages_of,
    within_parts,
)

from ddpobs import wire
from ddpobs.whatif.schedule import predicted_schedule_ns
from tests.support.analysis.pipeline_scenario import columns, events
from tests.support.analysis.scenario import MS, with_columns
from tests.support.columns import make_spans


def test_ranks_with_the_same_stages_are_replicas() -> None:
    assert [(stage.held, stage.ranks, stage.name) for stage in stages_of(events())] == [
        ((0,), (0, 1), "stage 0"),
        ((1,), (2, 3), "stage 1"),
    ]
    interleaved = stages_of(events("ScheduleInterleaved1F1B", ("0,2", "1,3")))
    assert [stage.name for stage in interleaved] == ["stages 0 and 2", "stages 1 and 3"]


@pytest.mark.parametrize(
    "reported",
    [
        [],
        events()[:2],
        [(rank, wire.Event(kind="pipeline", at_ns=0, detail={"held": "x", "stages": 2})) for rank in range(4)],
    ],
    ids=["none", "a stage is missing", "nonsense"],
)
def test_without_every_stages_report_there_is_no_pipeline(reported: list[tuple[int, wire.Event]]) -> None:
    assert stages_of(reported) == []


@pytest.mark.parametrize(
    ("schedule", "held", "share"),
    [
        ("ScheduleGPipe", ("0", "1"), 1 / 5),
        ("Schedule1F1B", ("0", "1"), 1 / 5),
        ("ScheduleInterleaved1F1B", ("0,2", "1,3"), 1 / 9),
        ("ScheduleZBVZeroBubble", ("0,3", "1,2"), None),
    ],
)
def test_the_formula_of_the_bubble(schedule: str, held: tuple[str, str], share: float | None) -> None:
    assert expected_bubble(stages_of(events(schedule, held))) == (pytest.approx(share) if share else None)


def test_the_prediction_with_equal_stages_has_the_formulas_bubble() -> None:
    equal_ns = predicted_schedule_ns([40.0, 40.0], 4)
    assert 1 - 40.0 / equal_ns == pytest.approx(expected_bubble(stages_of(events())))


def test_a_slow_replica_does_not_count_as_its_stages_computation() -> None:
    first, second = stage_times(stages_of(events()), *columns([40, 60, 40, 40]))
    assert (first.computing_ns, second.computing_ns) == (40 * MS, 40 * MS)
    assert first.bubble == pytest.approx((30 / 70 + 10 / 70) / 2)
    assert second.bubble == pytest.approx(30 / 70)


def test_within_stages_only_the_slow_replica_differs() -> None:
    rank, steps = columns([16, 26, 48, 48])
    joined = within_parts(join(rank, steps), stages_of(events()))
    assert joined.own_ns[0].tolist() == [26 * MS, 36 * MS, 26 * MS, 26 * MS]
    late = lateness(joined)
    assert set(late.last.tolist()) == {1}
    assert late.delay_ns[0] == 10 * MS
    assert within_parts(join(rank, steps), []).own_ns[0].tolist() == [16 * MS, 26 * MS, 48 * MS, 48 * MS]


def test_a_stage_whose_steps_have_no_clean_start_has_no_times() -> None:
    rank, steps = columns([40] * 4)
    unclean = with_columns(steps, flags=np.where(rank == 2, wire.NO_ORIGIN, steps.flags))
    assert stage_times(stages_of(events()), rank, unclean) == []


def replica(rank: int, blocks_sends: bool = False, first_receive_ms: int = 30) -> RankColumns:
    """A rank with an all-reduce of 10 ms, for which it waits 8 ms, and then for its first receive."""
    ranks, steps = columns([40] * 4)
    steps = steps.select(ranks == rank)
    steps = with_columns(steps, exposed_comm_ns=steps.receive_wait_ns + 8 * MS)
    spans = make_spans(
        step=steps.step, launched_ns=steps.end_ns - 20 * MS, done_ns=steps.end_ns - 10 * MS, started_ns=wire.UNKNOWN
    )
    receives = {"step": steps.step, "module": 0 * steps.step, "kind": 0 * steps.step + wire.COMM_KINDS.index("receive")}
    comms = wire.Comms(**receives, launched_ns=steps.start_ns, done_ns=steps.start_ns + first_receive_ms * MS)
    return RankColumns(steps, spans, comms, blocks_sends)


FIRST, LAST = Stage("ScheduleGPipe", 2, (0,), 4, (0, 1)), Stage("ScheduleGPipe", 2, (1,), 4, (2, 3))


@pytest.mark.parametrize(
    ("stage", "columns_of", "overlap"),
    [
        (LAST, replica(2), 1.0),
        (LAST, replica(2, first_receive_ms=0), 0.2),
        (LAST, replica(2, blocks_sends=True), 0.2),
        (FIRST, replica(0), 0.2),
    ],
    ids=["earlier stages still work", "no stage works", "torch's reducer delays the send", "the first stage ends last"],
)
def test_a_wait_for_the_all_reduce_is_hidden_while_earlier_stages_work(
    stage: Stage, columns_of: RankColumns, overlap: float
) -> None:
    measured = reduction(stage, [columns_of])
    assert measured is not None
    assert (measured.reduce_ns, measured.wait_ns) == (10 * MS, 8 * MS)
    assert measured.overlap == pytest.approx(overlap)


def test_without_spans_the_overlap_is_not_known() -> None:
    columns_of = replica(2)
    empty = columns_of.spans.select(columns_of.spans.step < 0)
    assert reduction(LAST, [RankColumns(columns_of.steps, empty, columns_of.comms)]) is None


def test_a_slow_replica_of_a_pipeline_costs_what_its_step_takes_longer() -> None:
    """S of ranks 0 to 3, of which rank 1, on the first stage, computes 80 ms in place of 40."""
    stages = stages_of(events("Schedule1F1B"))
    joined = join(*columns([40, 80, 40, 40]))
    slowdown = slowdown_of(stages, joined)
    assert slowdown is not None
    assert slowdown.by_rank.argmax() == 1
    assert slowdown.total > 1.2
    even = slowdown_of(stages, join(*columns([40, 40, 40, 40])))
    assert even is not None
    assert even.total == pytest.approx(1)


@pytest.mark.parametrize(
    ("schedule", "held"), [("ScheduleZBVZeroBubble", ("0", "1")), ("Schedule1F1B", ("0,2", "1,3"))]
)
def test_the_cost_of_slow_ranks_needs_a_schedule_that_is_replayed(schedule: str, held: tuple[str, str]) -> None:
    assert slowdown_of(stages_of(events(schedule, held)), join(*columns([40, 80, 40, 40]))) is None
