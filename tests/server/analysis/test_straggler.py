"""The slow rank is named with its phase, and a balanced run names nobody."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ddpobs_server.analysis.finding import Finding, NotJudged
from ddpobs_server.analysis.findings import straggler
from ddpobs_server.analysis.findings.straggler import (
    backward_began_ns,
    chance_of,
    gain,
    late_bucket,
    lateness,
    straggler_findings,
    weights,
)
from ddpobs_server.analysis.joined_steps import join

from ddpobs import wire
from tests.columns import make_spans
from tests.server.analysis.scenario import BASE_MS, MS, Slow, changed, columns, own_times, spans

SEEDS = 60
FALSE_ALARMS = 0.05
"""Most balanced runs of `SEEDS` in which somebody may be named."""


def found(own: wire.Ints) -> list[Finding]:
    judged = straggler_findings(join(*columns(own)), {0: "here", 1: "there"})
    assert not isinstance(judged, NotJudged)
    return judged


def exact(extra: dict[int, tuple[str, float]], steps: int = 40, ranks: int = 4) -> wire.Ints:
    """No noise at all: the base times, and extra milliseconds of some ranks in one phase."""
    own = np.tile(np.array([BASE_MS[phase] for phase in wire.OWN_PHASES]), (steps, ranks, 1))
    for rank, (phase, ms) in extra.items():
        own[:, rank, wire.OWN_PHASES.index(phase)] += ms
    return (own * MS).astype(np.int64)


@pytest.mark.parametrize(
    ("window_ns", "counts"),
    [
        ([10, 10, 80, 20, 10], [1, 1, 0.5, 1, 1]),
        ([0, 0, 0, 0, 10, 10, 80], [1, 1, 1, 1, 1, 1, 0.5]),
        ([0, 0, 0], [1, 1, 1]),
        ([], []),
    ],
)
def test_no_step_counts_for_more_than_four_median_ones_of_those_that_took_time(
    window_ns: list[int], counts: list[float]
) -> None:
    assert weights(np.array(window_ns, np.float64)).tolist() == counts


def test_steps_that_took_no_time_cost_nothing() -> None:
    joined = join(*columns(np.zeros((40, 2, len(wire.OWN_PHASES)), np.int64)))
    none = replace(joined, wall_ns=np.zeros_like(joined.wall_ns))
    assert straggler.cost_shares(none, lateness(none), np.arange(40)).tolist() == [0, 0]


@pytest.mark.parametrize("collectives", [32, 200])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_balanced_run_names_nobody(ranks: int, collectives: int) -> None:
    alarms = [found(own_times(collectives, ranks, seed)) for seed in range(SEEDS)]
    assert np.mean([bool(named) for named in alarms]) <= FALSE_ALARMS


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_balanced_run_whose_noise_comes_in_bursts_names_nobody(ranks: int) -> None:
    alarms = [found(own_times(200, ranks, seed, burst_steps=10)) for seed in range(SEEDS)]
    assert np.mean([bool(named) for named in alarms]) <= FALSE_ALARMS


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("phase", wire.OWN_PHASES)
def test_a_slow_rank_is_named_with_its_phase(phase: str, ranks: int) -> None:
    for slow in range(ranks):
        named = found(own_times(60, ranks, seed=slow, slow=(Slow(slow, phase),)))
        assert [(f.ranks, f.phase) for f in named] == [([slow], phase)]
        assert f"Rank {slow}" in named[0].title
        assert phase in named[0].title


@pytest.mark.parametrize("ranks", [4, 8])
def test_two_slow_ranks_are_both_named_each_with_its_own_phase(ranks: int) -> None:
    for seed in range(5):
        named = found(own_times(100, ranks, seed, (Slow(1, "backward", 60), Slow(ranks - 1, "data", 45))))
        assert sorted((f.ranks[0], f.phase) for f in named) == [(1, "backward"), (ranks - 1, "data")]


def test_a_rank_slow_in_some_steps_is_intermittent_and_its_share_is_said() -> None:
    (finding,) = found(own_times(200, 4, seed=0, slow=(Slow(2, "data", 80, share=0.25),)))
    assert (finding.ranks, finding.phase, finding.evidence["kind"]) == ([2], "data", "intermittent")
    assert 0.2 < finding.evidence["late_share"] < 0.4


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_that_is_very_slow_in_every_tenth_step_is_named_where_noise_makes_all_late_as_often(ranks: int) -> None:
    told = []
    for seed in range(10):
        own = own_times(300, ranks, seed)
        own[5::10, 1, wire.OWN_PHASES.index("forward")] += 300 * MS
        (finding,) = found(own)
        assert (finding.ranks, finding.phase, finding.evidence["kind"]) == ([1], "forward", "intermittent")
        told.append((finding.evidence["late_share"], finding.evidence["excess_ns"]))
    late_share, excess_ns = np.median(told, axis=0)
    assert late_share == pytest.approx(0.1, abs=0.02)
    assert excess_ns == pytest.approx(300 * MS, rel=0.05)


def test_a_difference_below_a_twentieth_of_the_step_is_nobodys_fault() -> None:
    assert found(exact({1: ("backward", 3.5)})) == []


def test_a_habit_that_costs_less_than_a_twentieth_of_the_step_is_nobodys_fault() -> None:
    # 12 ms in every fourth step of 78: never chance, and 3 ms a step.
    own = exact({}, steps=80)
    own[::4, 1, wire.OWN_PHASES.index("backward")] += 12 * MS
    assert found(own) == []
    own[::4, 1, wire.OWN_PHASES.index("backward")] += 12 * MS
    assert [f.ranks for f in found(own)] == [[1]]


def test_two_phases_are_both_named_when_neither_explains_four_fifths() -> None:
    own = exact({1: ("backward", 24)})
    own[:, 1, wire.OWN_PHASES.index("forward")] += 16 * MS
    (finding,) = found(own)
    assert finding.phase == "backward"
    assert finding.evidence["phase_excess_ns"] == {"backward": 24 * MS, "forward": 16 * MS}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_delay_gain_and_severity_are_those_of_the_sum(ranks: int) -> None:
    # Own times 75 ms; rank 1 has 40 ms more; 3 ms move: a step of 118 ms that would last 78.
    (finding,) = found(exact({1: ("backward", 40)}, ranks=ranks))
    assert finding.gain is not None
    assert finding.gain.step_ns == finding.evidence["excess_ns"] == 40 * MS
    assert finding.gain.ratio == pytest.approx(40 / 118, abs=1e-4)
    assert finding.gain.error_ratio == 0
    assert finding.severity == "critical"
    assert finding.steps == (0, 39)
    assert finding.evidence["host"] == "there"


def test_the_delay_of_two_ranks_is_the_whole_difference() -> None:
    late = lateness(join(*columns(exact({0: ("data", 10)}, ranks=2))))
    assert set(late.delay_ns.tolist()) == {10.0 * MS}
    assert set(late.last.tolist()) == {0}


def test_the_gain_of_one_of_two_equally_slow_ranks_is_nothing_while_the_other_stays() -> None:
    joined = join(*columns(exact({1: ("backward", 40), 2: ("backward", 40)})))
    assert gain(joined, lateness(joined), 1).step_ns == 0


def test_each_of_two_equally_slow_ranks_is_as_severe_as_one_alone() -> None:
    two = found(exact({1: ("backward", 40), 2: ("backward", 40)}, ranks=8))
    (one,) = found(exact({1: ("backward", 40)}, ranks=8))
    assert [(f.ranks, f.severity) for f in two] == [([1], one.severity), ([2], one.severity)]
    assert one.severity == "critical"
    assert all("Other ranks are late" in f.remedy for f in two)
    assert "Other ranks are late" not in one.remedy


def test_clocks_that_differ_by_hours_change_nothing() -> None:
    # scenario.columns puts every rank an hour apart; the finding is that of the durations alone.
    assert [f.ranks for f in found(exact({3: ("optimizer", 20)}))] == [[3]]


def test_too_few_steps_and_too_few_ranks_are_said() -> None:
    few = straggler_findings(join(*columns(own_times(12, 2, 0))), {})
    alone = straggler_findings(join(*columns(own_times(60, 1, 0))), {})
    assert isinstance(few, NotJudged)
    assert "12 of 32" in str(few)
    assert isinstance(alone, NotJudged)
    assert "two ranks" in str(alone)


def test_the_same_run_gets_the_same_answer() -> None:
    own = own_times(100, 4, seed=3, slow=(Slow(0, "forward", 15),))
    assert found(own) == found(own)


def test_chance_is_small_for_the_rank_that_is_always_late_and_large_for_the_others() -> None:
    late = np.zeros((80, 4), bool)
    late[:, 2] = True
    chance = chance_of(late)
    assert chance[2] == pytest.approx(1 / 401)
    assert set(np.delete(chance, 2).tolist()) == {1.0}


def test_chance_is_one_where_all_are_late_alike() -> None:
    assert chance_of(np.ones((80, 3), bool)).tolist() == [1.0, 1.0, 1.0]


def test_rotating_many_ranks_says_of_chance_what_permuting_them_says(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    for share in (0.02, 0.1, 0.3):
        late = random.random((400, 24)) < 0.1
        late[:, 5] |= random.random(400) < share
        said = []
        for many in (0, 2**20):
            monkeypatch.setattr(straggler, "_MANY", many)
            said.append(chance_of(late))
        # Both count 400 drawings: their standard deviation is at most 0.025.
        assert np.abs(said[0] - said[1]).max() < 0.1
        assert (said[0][5] <= 0.01) == (said[1][5] <= 0.01)


def test_a_slow_rank_among_a_thousand_is_named_alone() -> None:
    own = own_times(40, 1000, seed=2, slow=(Slow(700, "data", 60),))
    assert [(f.ranks, f.phase) for f in found(own)] == [([700], "data")]


def test_when_backward_began_is_told_where_the_step_is_known_and_has_one_micro_step() -> None:
    rank, steps = columns(own_times(4, 3, seed=1))
    steps = changed(steps, micro_steps=np.where((steps.step == 2) & (rank == 1), 2, 1))
    rows = [(step, bucket, step * 100 + bucket, 0, 0) for step in range(1, 5) for _ in range(3) for bucket in (0, 1)]
    of, cut = spans([r for _ in range(4) for r in range(3) for _ in range(2)], rows)
    began = backward_began_ns((rank, steps), (of, cut))
    for at, step, r in zip(began.tolist(), cut.step.tolist(), of.tolist(), strict=True):
        backward = steps.backward_ns[(steps.step == step) & (rank == r)]
        known = step < 4 and (step, r) != (2, 1)
        assert at == (step * 100 + 1 - int(backward[0]) if known else wire.UNKNOWN)


def lags(per_bucket: list[int]) -> int | None:
    """Two ranks, 4 steps, a bucket every 10 ms; rank 1 lags by so many ms at each bucket."""
    rank, rows, began = [], [], []
    for step in range(4):
        for r in (0, 1):
            base = (step * 1000 + r * 777) * MS
            for bucket, lag in enumerate(per_bucket):
                ready = base + ((bucket + 1) * 10 + r * lag) * MS
                rank.append(r)
                began.append(base)
                rows.append((step, bucket, ready, ready, ready + MS))
    found = late_bucket(1, *spans(rank, rows), np.array(began), max(per_bucket) * MS)
    return None if found is None else found[2]


@pytest.mark.parametrize("late", [0, 1, 3])
def test_the_bucket_at_which_the_lag_appears_is_named(late: int) -> None:
    assert lags([40 if bucket >= late else 0 for bucket in range(4)]) == late


def test_no_bucket_is_named_without_a_lag() -> None:
    assert lags([0, 0, 0, 0]) is None


def test_no_bucket_is_named_when_the_whole_backward_is_slow() -> None:
    assert lags([5 * (bucket + 1) for bucket in range(8)]) is None


def with_tail(own: wire.Ints, tail_s: float) -> tuple[wire.Ints, wire.Steps]:
    """The last step lasts so much longer on every rank, as where an upload follows it."""
    rank, steps = columns(own)
    return rank, changed(steps, end_ns=steps.end_ns + np.where(steps.step == len(own) - 1, round(tail_s * 1e9), 0))


@pytest.mark.parametrize("steps", [32, 200])
@pytest.mark.parametrize("tail_s", [12, 600])
def test_one_long_step_takes_nothing_from_what_is_said_of_a_slow_rank(steps: int, tail_s: float) -> None:
    own = exact({1: ("backward", 40)}, steps=steps)
    (plain,), (finding,) = found(own), straggler_findings(join(*with_tail(own, tail_s)), {})  # type: ignore[misc]
    assert (finding.ranks, finding.severity) == ([1], plain.severity)
    assert (finding.title.split()[-2], finding.evidence["step_ns"]) == ("118.0", 118 * MS)
    assert finding.evidence["lost_share"] == pytest.approx(plain.evidence["lost_share"], rel=0.15)
    assert finding.gain.ratio == pytest.approx(plain.gain.ratio, rel=0.15)  # type: ignore[union-attr]


def test_a_long_stall_of_one_step_is_no_gain() -> None:
    own = exact({1: ("backward", 40)}, steps=200)
    own[77, 1, wire.OWN_PHASES.index("other")] += 60_000 * MS
    joined = join(*columns(own))
    assert gain(joined, lateness(joined), 1).step_ns == pytest.approx(40 * MS, rel=0.06)


def test_a_checkpoint_of_one_rank_every_hundred_steps_is_no_straggler() -> None:
    own = exact({}, steps=1000)
    own[50::100, 0, wire.OWN_PHASES.index("other")] += 10_000 * MS
    assert found(own) == []


@pytest.mark.parametrize("since", [70, 100, 256, 500, 700])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_becomes_slow_is_named_with_the_step_since_which_it_is(ranks: int, since: int) -> None:
    own = own_times(1500 + since, ranks, seed=since)
    own[1500:, 1, wire.OWN_PHASES.index("backward")] += 40 * MS
    (finding,) = found(own)
    assert (finding.ranks, finding.phase, finding.evidence["kind"]) == ([1], "backward", "persistent")
    assert finding.steps == (pytest.approx(1500, abs=5), 1499 + since)
    assert finding.evidence["since_step"] == finding.steps[0]
    assert f"since step {finding.steps[0]}" in finding.title


def test_a_rank_that_is_slow_all_the_time_is_named_once_and_since_no_step() -> None:
    (finding,) = found(own_times(600, 4, seed=0, slow=(Slow(2, "backward"),)))
    assert (finding.steps, finding.evidence["since_step"]) == ((0, 599), None)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("burst_steps", [0, 10, 20, 50])
def test_noise_in_bursts_does_not_make_a_rank_slow_of_late(ranks: int, burst_steps: float) -> None:
    alarms = [found(own_times(200, ranks, seed, burst_steps=burst_steps)) for seed in range(SEEDS)]
    assert np.mean([any(f.evidence["since_step"] is not None for f in named) for named in alarms]) <= FALSE_ALARMS


def test_one_late_step_of_another_module_does_not_name_that_ones_bucket() -> None:
    """Module 0 lags by 40 ms at its bucket 1 in 8 steps; module 1 by a spike of 90 ms in one of its own."""
    rank, rows, began, module = [], [], [], []
    for step in range(9):
        for r in (0, 1):
            for bucket in (0, 1):
                lag = r * (90 if step == 8 else 40 * bucket)
                rank.append(r)
                began.append(step * 1000 * MS)
                module.append(int(step == 8))
                rows.append((step, bucket, (step * 1000 + 10 * (bucket + 1) + lag) * MS, 0, 0))
    of, cut = spans(rank, rows)
    cut = changed(cut, module=np.array(module))
    assert late_bucket(1, of, cut, np.array(began), 40 * MS) == (0, 0, 1)


def test_of_two_modules_in_one_backward_the_one_in_which_the_lag_arises_is_named() -> None:
    """Module 1's bucket lags by 40 ms, and so all of module 0 that follows is as late."""
    rank, rows, module = [], [], []
    for step in range(4):
        for r in (0, 1):
            for place, of in enumerate((1, 0, 0)):
                rank.append(r)
                module.append(of)
                rows.append((step, max(0, place - 1), (step * 1000 + 10 * (place + 1) + 40 * r) * MS, 0, 0))
    ranks, cut = spans(rank, rows)
    cut = changed(cut, module=np.array(module))
    assert late_bucket(1, ranks, cut, cut.step * 1000 * MS, 40 * MS) == (1, 0, 0)


def test_no_bucket_is_named_that_holds_less_than_half_of_the_excess() -> None:
    rank, rows = [0, 1] * 4, [(step, 0, (step * 1000 + 10 + 15 * r) * MS, 0, 0) for step in range(4) for r in (0, 1)]
    of, cut = spans(rank, rows)
    began = cut.step * 1000 * MS
    assert late_bucket(1, of, cut, began, 40 * MS) is None
    assert late_bucket(1, of, cut, began, 30 * MS) == (0, 0, 0)


@pytest.mark.timeout(5)
def test_of_a_hundred_thousand_buckets_the_late_one_is_found_at_once() -> None:
    """As many as a client makes up: to look at all rows for each takes ten seconds."""
    rank, bucket = np.repeat([0, 1], 100_000), np.tile(np.arange(100_000), 2)
    ready = (bucket + 1) * MS + 40 * MS * ((rank == 1) & (bucket >= 12_345))
    cut = make_spans(bucket=bucket, ready_ns=ready)
    assert late_bucket(1, rank, cut, np.zeros_like(ready), 40 * MS) == (0, 0, 12_345)


def test_a_rank_that_naps_before_a_barrier_costs_less_than_everything() -> None:
    """The others wait in the step before, whose time is long; the step after is as short as any."""
    own = exact({}, steps=160)
    own[::4, 1, wire.OWN_PHASES.index("other")] += 1200 * MS
    joined = join(*columns(own, barrier=True))
    assert joined.window_ns.sum() == pytest.approx(joined.step_ns.sum(), rel=0.05)
    (finding,) = straggler_findings(joined, {})
    assert finding.ranks == [1]
    assert finding.gain is not None
    assert 0.2 < finding.gain.ratio < 0.8
    assert 0.2 < finding.evidence["lost_share"] < 0.8
