"""The words of a slow rank: each part states its own facts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ddpobs_server.analysis.evidence import Evidence
from ddpobs_server.analysis.finding import Gain, Interval, how_often
from ddpobs_server.analysis.slow_ranks.describe import describe_in_turn, describe_slow_rank
from ddpobs_server.analysis.slow_ranks.facts import RankTurn, SlowRankFacts, TakingTurnsFacts
from ddpobs_server.analysis.slow_ranks.lateness import largest_phases
from ddpobs_server.analysis.slow_ranks.slow_rank import (
    BusyThread,
    Cause,
    DeviceClock,
    LateBucket,
    SlowInTurn,
    SlowRank,
)

from ddpobs import wire
from tests.support.analysis.judged import facts_of
from tests.support.analysis.scenario import MS, columns, evidence_of, noiseless

START_NS = 1_700_000_000 * 10**9
SLOW = SlowRank(
    rank=2,
    phase="backward",
    steps=(150, 599),
    steps_used=450,
    late_share=0.89,
    lost_share=0.2,
    chance=0.0025,
    excess_ns=30 * MS,
    step_ns=81 * MS,
    phase_excess_ns={"backward": 30 * MS},
    severity="warning",
    since_step=150,
    gain=Gain(29 * MS, 0.36, 0.01),
    intervals=(Interval(150, 599, START_NS, START_NS + 60 * 10**9),),
    lost_ns=6e9,
    run_share=0.1,
    bucket=LateBucket(0, 3, ("head.weight", "head.bias"), "bucket 0.3: head.weight, head.bias"),
    cause=Cause("preempted", share=0.96, parts_ns={"preempted": 29.0 * MS}),
)


@pytest.fixture
def evidence() -> Evidence:
    return evidence_of(*columns(noiseless({})), hosts={2: "node7"})


def test_a_slow_rank_has_verdict_measure_times_cause_place_and_gain(evidence: Evidence) -> None:
    finding = describe_slow_rank(SLOW, evidence, None)
    assert finding.verdict == "Rank 2 is slow in backward since step 150"
    assert finding.measure == "+30 ms a step, 37 % of it; 89 % of the steps since then; 0.3 rank-minutes of waiting"
    assert finding.when == "22:13:20–22:14:20 UTC (60 s)"
    assert finding.cause == "preempted by other processes (96 % of the delay)"
    assert finding.where == "host node7, bucket 0.3: head.weight, head.bias"
    assert finding.gain is not None
    assert finding.gain.text == "29 ms of 80.6 ms a step (36.0 ± 0.4 %)"


@pytest.mark.parametrize(
    ("error_ratio", "share"), [(0.1, "36 ± 4 %"), (0.01, "36.0 ± 0.4 %"), (0.001, "36.0 %"), (0.0, "36.0 %")]
)
def test_no_error_of_a_gain_is_written_as_nothing(error_ratio: float, share: str) -> None:
    assert Gain(29 * MS, 0.36, error_ratio).text == f"29 ms of 80.6 ms a step ({share})"


def test_the_verdict_names_no_step_that_it_does_not_know(evidence: Evidence) -> None:
    over = describe_slow_rank(replace(SLOW, since_step=None, is_over=True, gain=None), evidence, None)
    assert over.verdict == "Rank 2 was slow in backward"
    assert over.when == "steps 150 to 599, 22:13:20–22:14:20 UTC (60 s)"
    twice = replace(SLOW, intervals=(Interval(5, 40), *SLOW.intervals))
    assert describe_slow_rank(twice, evidence, None).when == "2 stretches of the steps 5 to 599"


def test_the_measure_states_the_main_phase_if_it_is_not_the_whole_delay(evidence: Evidence) -> None:
    parts = replace(SLOW, phase_excess_ns={"backward": 20 * MS, "data": 10 * MS}, late_share=1.0)
    measure = describe_slow_rank(parts, evidence, None).measure
    assert (
        measure == "+30 ms a step (20 ms in backward), 37 % of it; every step since then; 0.3 rank-minutes of waiting"
    )


def test_the_delay_of_a_rank_that_is_seldom_late_is_of_its_late_steps(evidence: Evidence) -> None:
    measure = describe_slow_rank(replace(SLOW, late_share=0.14, excess_ns=243 * MS), evidence, None).measure
    late = "+243 ms a late step (30 ms in backward), 300 % of a usual step; 14 % of the steps since then"
    assert measure == f"{late}; 0.3 rank-minutes of waiting"


def test_a_cause_that_is_not_known_is_stated_with_its_reason(evidence: Evidence) -> None:
    finding = describe_slow_rank(replace(SLOW, cause=Cause(missing_counter="running_ns")), evidence, None)
    assert finding.cause.startswith("not known, because the processor time of rank 2 or of the others is not recorded")
    finding = describe_slow_rank(replace(SLOW, cause=Cause()), evidence, None)
    assert finding.cause == "not known, because the counters of its late steps are no longer examined"


WORK = Cause("own-work", parts_ns={"own-work": 30.0 * MS}, counter_excess={"running_ns": 30.0 * MS})
REASONS = {
    "preempted by other processes": SLOW.cause,
    "throttled: its device's clock is lower than the others'": replace(WORK, device=DeviceClock(300, 1410.0, ())),
    "its thread writer shares the interpreter lock with training": replace(WORK, thread=BusyThread("writer", 0.7)),
    "more work of its own": WORK,
    "its own code waits for data or a lock, or sleeps": replace(WORK, blocked_ns=40.0 * MS),
    "not known, because the counters of its late steps are no longer examined": Cause(),
}


@pytest.mark.parametrize("reason", REASONS)
def test_the_reason_for_labels_is_the_cause_without_its_figures(reason: str, evidence: Evidence) -> None:
    facts = facts_of(SlowRankFacts, describe_slow_rank(replace(SLOW, cause=REASONS[reason]), evidence, None))
    assert facts.reason == reason


@pytest.mark.parametrize(("gain", "is_stated"), [(0.09, True), (0.11, False)])
def test_the_remedy_states_that_other_ranks_are_late_if_most_of_the_gain_needs_them(
    gain: float, is_stated: bool, evidence: Evidence
) -> None:
    slow = replace(SLOW, cause=Cause(), gain=Gain(MS, gain, 0.0))
    assert ("Other ranks are late" in describe_slow_rank(slow, evidence, None).remedy) is is_stated


def test_the_remedy_begins_with_the_place(evidence: Evidence) -> None:
    hello = wire.Hello(host="node7", pid=4711, device="cpu", backend="gloo", versions={}, settings={})
    known = replace(evidence, hellos={2: hello})
    finding = describe_slow_rank(SLOW, known, None)
    assert finding.where == "host node7, pid 4711, bucket 0.3: head.weight, head.bias"
    assert finding.remedy.startswith("Rank 2 on node7 (pid 4711), backward of head: give it processors of its own")
    sleeps = Cause("own-work", parts_ns={"own-work": 30.0 * MS}, counter_excess={"running_ns": 0.0}, blocked_ns=3e7)
    finding = describe_slow_rank(replace(SLOW, cause=sleeps), known, None)
    assert finding.cause == "its own code waits 30 ms, for data or a lock, or sleeps"
    assert "`py-spy dump --pid 4711`" in finding.remedy


def test_time_in_the_run_queue_is_named_beside_the_work_that_causes_it(evidence: Evidence) -> None:
    counters = {"running_ns": 41.0 * MS, "run_delay_ns": 117.0 * MS}
    queued = Cause("own-work", parts_ns={"own-work": 158.0 * MS}, counter_excess=counters)
    cause = describe_slow_rank(replace(SLOW, cause=queued), evidence, None).cause
    assert cause == "more work of its own on a busy processor: it runs 41 ms longer, and waits 117 ms for it"


@pytest.mark.parametrize(("ranks", "named"), [(2, "Ranks 0 and 1"), (4, "Ranks 0, 1, 2 and 3"), (5, "5 ranks")])
def test_ranks_that_are_slow_in_turn_are_named_up_to_four(ranks: int, named: str, evidence: Evidence) -> None:
    turns = [RankTurn(rank, "forward", 0.5, 9 * MS, 1 / ranks, 10**9, 0.0025) for rank in range(ranks)]
    facts = TakingTurnsFacts(turns, lost_ns=ranks * 10**9, lost_share=0.3, run_share=0.2, steps_used=450)
    slow = SlowInTurn(facts, list(range(ranks)), "forward", (0, 449), (Interval(0, 449),), "critical", False, None)
    finding = describe_in_turn(slow, evidence, None)
    assert finding.verdict == f"{named} are slow in turn in forward"
    assert finding.measure.count("+9 ms in forward") == min(ranks, 4)
    assert finding.measure.endswith(f"; {ranks * 3 / 60:.3g} rank-minutes of waiting, 30 % of these steps")


@pytest.mark.parametrize(
    ("share", "words"),
    [(1.0, "every step"), (0.981, "every step"), (0.98, "98 % of the steps"), (0.5, "50 % of the steps")],
)
def test_more_than_ninety_eight_percent_of_the_steps_are_every_step(share: float, words: str) -> None:
    assert how_often(share) == words


@pytest.mark.parametrize(("late_share", "is_persistent"), [(0.6, True), (0.599, False)])
def test_a_rank_that_is_late_in_three_fifths_of_the_steps_is_slow_all_the_time(
    late_share: float, is_persistent: bool, evidence: Evidence
) -> None:
    slow = replace(SLOW, late_share=late_share)
    assert slow.is_persistent is is_persistent
    facts = facts_of(SlowRankFacts, describe_slow_rank(slow, evidence, None))
    assert facts.kind == ("persistent" if is_persistent else "intermittent")


def test_the_phases_that_explain_four_fifths_of_an_excess_are_named_the_largest_first() -> None:
    assert largest_phases(np.array([0.0, 30.0, 50.0, 20.0, -5.0])) == {"backward": 50.0, "forward": 30.0}
    assert list(largest_phases(np.array([0.0, 29.0, 50.0, 21.0, 0.0]))) == ["backward", "forward", "optimizer"]
    assert largest_phases(np.zeros(5)) == {}
