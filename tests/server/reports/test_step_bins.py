"""Bins of steps: made from columns once, kept after them, made anew for late batches, and read at any width."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np
import pytest
from ddpobs_server.analysis.steps.step_bins import (
    COMPARED,
    NAMES,
    TIMES,
    StepBins,
    bins_of_steps,
    lateness_of,
    merged_bins,
    over_ranks,
)
from ddpobs_server.operations.make_bins import update_step_bins, write_bins
from ddpobs_server.operations.retention import RetentionJob
from ddpobs_server.reports import judged_steps, read_bins, recent_steps
from ddpobs_server.reports.columns import RunColumns
from ddpobs_server.reports.read_bins import AttemptBins, Shown, read_lateness, read_step_bins
from ddpobs_server.reports.reports import Reports
from ddpobs_server.settings import Settings
from ddpobs_server.store import Arrival, Store
from ddpobs_server.store.sums.stored_bins import BIN_STEPS, FACTOR, LEVELS
from prometheus_client import CollectorRegistry

from ddpobs import wire
from tests.support.analysis.scenario import MS, Slow, columns, own_times
from tests.support.server.batches import ATTEMPT, batch

RUN = "a-run"
DAY_NS = 86_400 * 10**9
PER_BATCH = 50


def noisy(count: int, ranks: int, seed: int = 0, **facts: Any) -> tuple[wire.Ints, wire.Steps]:
    return columns(own_times(count, ranks, seed, **facts))


def send(store: Store, rank: wire.Ints, steps: wire.Steps, *, received_ns: int = 1, goodbye: bool = True) -> None:
    """Each rank sends its steps in batches of `PER_BATCH`, then its end."""
    for number in np.unique(rank).tolist():
        own = np.flatnonzero(rank == number)
        parts = [own[begin : begin + PER_BATCH] for begin in range(0, len(own), PER_BATCH)]
        arrive(store, received_ns, *(part_of(number, steps, part) for part in parts))
        if goodbye:
            end = wire.Event(kind="goodbye", at_ns=0)
            arrive(store, received_ns, batch(RUN, seq=10**6, rank=number, events=[end]))


def part_of(rank: int, steps: wire.Steps, rows: wire.Ints) -> wire.Batch:
    return batch(RUN, seq=int(steps.step[rows[0]]), rank=rank, steps=steps.select(rows))


def arrive(store: Store, received_ns: int, *batches: wire.Batch) -> None:
    arrivals = []
    for item in (msgspec.structs.replace(sent, world_size=128) for sent in batches):
        body = wire.encode(item)
        arrivals.append(Arrival(wire.decode(body), hashlib.sha256(body).digest(), len(body), received_ns))
    store.ingest(arrivals)


def update(store: Store, now_ns: int = 2) -> int:
    return sum(update_step_bins(AttemptBins(store, RUN, ATTEMPT), now_ns))


def read(store: Store, last: int, points: int, shown: Shown | None = None) -> StepBins:
    return read_step_bins(AttemptBins(store, RUN, ATTEMPT), (0, last), points, shown or Shown())


def assert_holds(bins: StepBins, rank: wire.Ints, steps: wire.Steps) -> None:
    """Each row has the least and the most of its steps exactly, and a median between the quartiles."""
    times = {"wall": steps.end_ns - steps.start_ns} | {name: getattr(steps, f"{name}_ns") for name in wire.PHASES}
    for row in range(len(bins)):
        first, last = bins.column("first")[row], bins.column("last")[row]
        rows = (steps.step >= first) & (steps.step <= last)
        if (number := bins.column("rank")[row]) >= 0:
            rows &= rank == number
        assert bins.column("steps")[row] == rows.sum()
        for name in TIMES:
            values = times[name][rows]
            assert bins.column(f"{name}_min_ns")[row] == values.min()
            assert bins.column(f"{name}_max_ns")[row] == values.max()
            low, high = np.quantile(values, [0.25, 0.75])
            assert low <= bins.column(f"{name}_median_ns")[row] <= high


@pytest.fixture(autouse=True)
def bins_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read even few steps from bins."""
    monkeypatch.setattr(read_bins, "_COLUMN_ROWS", 0)


def test_the_least_the_median_and_the_most_of_each_bin_are_those_of_its_steps() -> None:
    rank, steps = noisy(100, 3)
    bins = bins_of_steps(rank, steps, 64)
    assert bins.column("first").tolist() == [0, 0, 0, 64, 64, 64]
    wall_ns = (steps.end_ns - steps.start_ns)[(rank == 1) & (steps.step < 64)]
    assert bins.column("wall_median_ns")[1] == int(np.median(wall_ns))
    assert_holds(bins, rank, steps)


def test_over_ranks_a_time_is_the_mean_of_the_ranks_so_that_two_waiting_ranks_are_two_thirds() -> None:
    rank, steps = noisy(64, 3)
    is_slow = rank == 2
    steps.exposed_comm_ns[:] = np.where(is_slow, 10, 40) * MS
    (over,) = over_ranks(bins_of_steps(rank, steps, 64)).table.T
    assert over[NAMES.index("exposed_comm_median_ns")] == 30 * MS
    assert over[NAMES.index("waiting_median_ns")] == 20 * MS


def test_ranks_with_different_steps_have_their_own_bins() -> None:
    rank, steps = noisy(100, 3)
    rows = np.flatnonzero((rank != 2) | (steps.step >= 90) | (steps.step % 3 == 0))
    assert_holds(bins_of_steps(rank[rows], steps.select(rows), 32), rank[rows], steps.select(rows))


def test_wider_bins_hold_the_steps_of_four() -> None:
    rank, steps = noisy(300, 2)
    bins = merged_bins(bins_of_steps(rank, steps, 16), 4)
    assert np.unique(bins.number).tolist() == [0, 1, 2, 3, 4]
    assert_holds(bins, rank, steps)
    assert_holds(over_ranks(bins), rank, steps)


def test_the_lateness_of_bins_is_that_of_their_steps() -> None:
    rank, steps = noisy(192, 3, slow=(Slow(1, "data"),))
    bins = bins_of_steps(rank, steps, 64)
    late = lateness_of(bins.number, {name: bins.column(name) for name in COMPARED}, 2)
    assert late is not None
    assert (len(late), late.steps.tolist()) == (3, [64, 64, 64])
    assert (late.late[:, 1] > 55).all()
    assert late.excess_ns[:, 1] == pytest.approx(40 * MS, rel=0.1)
    assert late.phase_ns[:, 1].argmax(axis=1).tolist() == [wire.OWN_PHASES.index("data")] * 3


@pytest.mark.parametrize("points", [4, 10, 100])
def test_a_run_in_bins_has_every_step_once(store: Store, points: int) -> None:
    rank, steps = noisy(1000, 2)
    send(store, rank, steps)
    assert update(store) > 0
    bins = read(store, 999, points)
    assert len(np.unique(bins.number)) <= points
    assert_holds(bins, rank, steps)
    assert bins.column("steps").sum() == 2000
    over = read(store, 999, points, Shown(over=True))
    assert_holds(over, rank, steps)
    one = read(store, 999, points, Shown(rank=1))
    assert (set(one.column("rank").tolist()), one.column("steps").sum()) == ({1}, 1000)


def test_many_ranks_are_stored_in_blocks(store: Store) -> None:
    rank, steps = noisy(150, 70)
    send(store, rank, steps)
    update(store)
    for shown in (Shown(), Shown(over=True), Shown(rank=3), Shown(rank=69)):
        bins = read(store, 149, 2, shown)
        assert_holds(bins, rank, steps)
        rows = 150 if shown.rank is not None else 150 * 70
        assert bins.column("steps").sum() == rows


@pytest.mark.parametrize("rank", [3, 32])
def test_the_lateness_of_one_rank_is_that_of_all_without_the_others(store: Store, rank: int) -> None:
    send(store, *noisy(150, 33, slow=(Slow(3, "data"), Slow(32, "data"))))
    update(store)
    attempt = AttemptBins(store, RUN, ATTEMPT)
    whole, own = read_lateness(attempt, (0, 149), 33), read_lateness(attempt, (0, 149), 33, rank)
    assert whole is not None
    assert own is not None
    assert (own.ranks.tolist(), own.first.tolist()) == ([rank], whole.first.tolist())
    np.testing.assert_array_equal(own.cost_ns, whole.cost_ns[:, [rank]])
    np.testing.assert_array_equal(own.time_ns, whole.time_ns)
    assert own.late.all()


def test_an_update_makes_each_bin_once(store: Store) -> None:
    send(store, *noisy(1000, 2))
    assert update(store) > 0
    assert update(store) == 0


def test_bins_of_a_running_attempt_end_where_the_slowest_rank_is_and_columns_show_the_rest(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, steps = noisy(400, 2)
    sent = (rank == 0) | (steps.step < 200)
    rows = rank[sent], steps.select(sent)
    send(store, *rows, goodbye=False)
    update(store)
    assert set(store.step_bin_states(RUN, ATTEMPT)) == {0, 1, 2}
    monkeypatch.setattr(read_bins, "_COLUMN_ROWS", 500)
    assert_holds(read(store, 399, 5), *rows)
    assert read(store, 399, 5).column("steps").sum() == 600


def test_a_late_batch_makes_its_bins_anew(store: Store) -> None:
    rank, steps = noisy(640, 2)
    late = (rank == 1) & (steps.step >= 100) & (steps.step < 150)
    send(store, rank[~late], steps.select(~late))
    update(store)
    arrive(store, 3, part_of(1, steps, np.flatnonzero(late)))
    assert {number for number, (stale, _) in store.step_bin_states(RUN, ATTEMPT).items() if stale} == {1, 2}
    update(store)
    bins = read(store, 639, 3)
    assert_holds(bins, rank, steps)
    assert bins.column("steps").sum() == 1280


def test_bins_outlive_the_columns_and_a_late_batch_after_them(store: Store) -> None:
    rank, steps = noisy(640, 2)
    late = (rank == 1) & (steps.step >= 100) & (steps.step < 150)
    send(store, rank[~late], steps.select(~late), received_ns=DAY_NS)
    settings = Settings(keep_spans_days=5, keep_share=1)
    job = RetentionJob(settings, store, CollectorRegistry())
    job.run_once(10 * DAY_NS)
    assert len(store.steps(RUN, ATTEMPT)[0]) == 0
    assert_holds(read(store, 639, 10), rank[~late], steps.select(~late))
    arrive(store, 10 * DAY_NS, part_of(1, steps, np.flatnonzero(late)))
    job.run_once(10 * DAY_NS + 1)
    assert read(store, 639, 10).column("steps").sum() == 1230


def test_a_deleted_run_has_no_bins_and_an_update_does_not_bring_them_back(store: Store) -> None:
    send(store, *noisy(200, 2))
    update(store)
    bins = AttemptBins(store, RUN, ATTEMPT)
    kept = bins.read(0, (0, 3), Shown())
    store.delete(RUN)
    write_bins(bins, 0, [0, 1, 2, 3], kept, dict.fromkeys(range(4), 1))
    assert store.step_bin_states(RUN, ATTEMPT) == {}


@pytest.mark.parametrize("has_columns", [True, False])
def test_a_long_run_is_judged_by_its_bins(store: Store, monkeypatch: pytest.MonkeyPatch, has_columns: bool) -> None:
    """Columns around the change points give their steps; without columns the bins do."""
    monkeypatch.setattr(judged_steps, "WHOLE_ROWS", 0)
    monkeypatch.setattr(recent_steps, "STEPS", 200)
    monkeypatch.setattr(recent_steps, "_MIN_STEPS", 200)
    own = own_times(3000, 2, seed=0)
    own[700:1250, 1, wire.OWN_PHASES.index("data")] += 75 * MS
    send(store, *columns(own))
    update(store)
    if not has_columns:
        monkeypatch.setattr("ddpobs_server.reports.diagnosis._EDGE_ROWS", 0)
    findings = Reports(store).diagnostics(RUN, ATTEMPT)["findings"]
    (finding,) = [finding for finding in findings if finding["code"] == "straggler"]
    assert (finding["ranks"], finding["phase"]) == ([1], "data")
    (interval,) = finding["intervals"]
    assert interval["from"] == pytest.approx(700, abs=3 if has_columns else 64)
    assert interval["to"] == pytest.approx(1249, abs=3 if has_columns else 64)
    starts = columns(own)[1].start_ns
    # Bins date it, on the wall clock of rank 0's anchor.
    assert interval["began_ns"] == 10**18 + int(starts[2 * (interval["from"] // 64 * 64)])


@pytest.mark.parametrize("whole_rows", [800, 150_000])
def test_any_part_of_a_run_can_be_judged(store: Store, monkeypatch: pytest.MonkeyPatch, whole_rows: int) -> None:
    monkeypatch.setattr(judged_steps, "WHOLE_ROWS", whole_rows)
    own = own_times(2600, 2, seed=0)
    own[900:1500, 1, wire.OWN_PHASES.index("backward")] += 75 * MS
    send(store, *columns(own))
    update(store)
    reports = Reports(store)

    def named(first: int | None, last: int | None) -> list[list[int]]:
        findings = reports.diagnostics_between(RUN, ATTEMPT, first, last)["findings"]
        return [finding["ranks"] for finding in findings if finding["code"] == "straggler"]

    assert named(None, None) == [[1]]
    assert named(950, 1400) == [[1]]
    assert named(0, 800) == []
    assert named(1600, None) == []
    assert named(5000, 6000) == []


def test_bins_that_do_not_fit_into_an_answer_continue_at_its_next_step(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(store, *noisy(1000, 2))
    update(store)
    monkeypatch.setattr("ddpobs_server.reports.columns._BIN_ROWS", 8)
    firsts: list[int] = []
    begin: int | None = 0
    while begin is not None:
        columns_of, begin = RunColumns(store, RUN, ATTEMPT).step_bins((begin, None), 10, None, mean=False)
        assert len(columns_of["first"]) <= 8
        firsts += columns_of["first"][columns_of["rank"] == 0].tolist()
    assert firsts == sorted(set(firsts))
    assert firsts[0] == 0


def test_a_part_of_a_run_without_columns_is_judged_by_its_bins(store: Store) -> None:
    own = own_times(2000, 2, seed=0)
    own[600:1000, 1, wire.OWN_PHASES.index("data")] += 75 * MS
    rank, steps = columns(own)
    old = steps.step < 1500
    send(store, rank[old], steps.select(old), received_ns=DAY_NS, goodbye=False)
    send(store, rank[~old], steps.select(~old), received_ns=10 * DAY_NS)
    RetentionJob(Settings(keep_spans_days=5, keep_share=1), store, CollectorRegistry()).run_once(10 * DAY_NS + 1)
    assert store.steps(RUN, ATTEMPT)[1].step.min() >= 1450
    findings = Reports(store).diagnostics(RUN, ATTEMPT)["findings"]
    (finding,) = [finding for finding in findings if finding["code"] == "straggler"]
    assert (finding["ranks"], finding["phase"]) == ([1], "data")
    assert finding["intervals"][0]["from"] == pytest.approx(600, abs=64)


def test_steps_far_apart_have_a_bin_each_and_no_others(store: Store) -> None:
    rank, steps = noisy(40, 2)
    number = np.where(steps.step < 20, steps.step, wire.MAX_STEP - 39 + steps.step)
    far = wire.Steps(**steps.by_name() | {"step": number})
    send(store, rank, far)
    attempt = AttemptBins(store, RUN, ATTEMPT)
    assert store.bins_with_columns(RUN, ATTEMPT).tolist() == [0, wire.MAX_STEP // BIN_STEPS]
    assert update(store) == 2 * LEVELS
    assert [sorted(attempt.states(level)) for level in (0, 1)] == [
        [0, wire.MAX_STEP // BIN_STEPS],
        [0, wire.MAX_STEP // BIN_STEPS // FACTOR],
    ]
    assert update(store) == 0
    assert read(store, wire.MAX_STEP, 500).column("steps").sum() == 80


def test_a_late_step_makes_the_bins_of_every_level_anew(store: Store) -> None:
    rank, steps = noisy(1200, 2)
    late = (rank == 1) & (steps.step == 2 * PER_BATCH)
    send(store, rank[~late], steps.select(~late))
    update(store)
    arrive(store, 1, batch(RUN, seq=2 * PER_BATCH, rank=1, steps=steps.select(late)))
    assert update(store) == 4
    for level in range(4):
        rows = AttemptBins(store, RUN, ATTEMPT).read(level, (0, 10**6), Shown())
        assert rows.column("steps").sum() == 2400
