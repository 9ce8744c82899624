"""Ranks with different clocks are put on one timeline."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from ddpobs_server.analysis.steps.clock_alignment import align, offsets_ns, steps_to_add

from ddpobs import wire
from tests.support.analysis.scenario import spans, steps_of, with_columns

AHEAD = {0: 0, 1: 5_000_000_000_123, 2: -7_654_321}


def shared_ends(ends: list[int], jitter_ns: int = 0, seed: int = 0) -> tuple[wire.Ints, wire.Spans]:
    """All ranks end each all-reduce together, up to a jitter; one bucket per step."""
    random = np.random.default_rng(seed)
    rank, rows = [], []
    for step, end in enumerate(ends):
        for number, ahead in AHEAD.items():
            done = end + ahead + int(random.integers(0, jitter_ns + 1))
            rank.append(number)
            rows.append((step, 0, done - 500, done - 400, done))
    return spans(rank, rows)


def offsets(rank: wire.Ints, columns: wire.Spans) -> tuple[dict[int, int], int]:
    """Offsets if every rank numbers its steps like the collectives."""
    return offsets_ns(steps_of(rank, columns.step, columns.step), (rank, columns))


def test_offsets_put_the_ends_of_a_synchronisation_onto_each_other() -> None:
    rank, columns = shared_ends([10**15 + step * 10**8 for step in range(50)])
    shifts, noise = offsets(rank, columns)
    assert shifts == {number: -ahead for number, ahead in AHEAD.items()}
    assert noise == 0
    on_one_clock = align(rank, shifts, columns.done_ns).reshape(-1, 3)
    assert (np.ptp(on_one_clock, axis=1) == 0).all()
    assert (on_one_clock[:, 0] == columns.done_ns[rank == 0]).all()


def test_noise_is_how_far_apart_the_ranks_still_end() -> None:
    rank, columns = shared_ends([step * 10**8 for step in range(200)], jitter_ns=100_000)
    shifts, noise = offsets(rank, columns)
    assert all(abs(shifts[number] + ahead) < 30_000 for number, ahead in AHEAD.items())
    # The spread of three uniform numbers is half their range on average.
    assert 30_000 < noise < 70_000


def test_an_unknown_time_stays_unknown() -> None:
    assert align(np.array([1]), {1: 5}, np.array([wire.UNKNOWN])).tolist() == [wire.UNKNOWN]


def test_without_a_shared_synchronisation_the_first_ends_are_taken_as_equal() -> None:
    shifts, noise = offsets(*spans([0, 1], [(0, 0, 1, 1, 100), (1, 0, 1, 1, 1100)]))
    assert (shifts, noise) == ({0: 0, 1: -1000}, 0)


def test_no_spans_give_no_offsets() -> None:
    rank, columns = shared_ends([1])
    no_spans = wire.Spans(**{name: getattr(columns, name)[:0] for name in columns.names})
    assert offsets(rank[:0], no_spans) == ({}, 0)


def test_offsets_are_correct_if_step_numbers_part() -> None:
    rank, columns = shared_ends([step * 10**8 for step in range(50)])
    local = columns.step + 2 * (rank == 1)
    parted = with_columns(columns, step=local)
    shifts, noise = offsets_ns(steps_of(rank, local, columns.step), (rank, parted))
    assert shifts == {number: -ahead for number, ahead in AHEAD.items()}
    assert noise == 0


def test_collectives_of_only_some_ranks_take_no_memory() -> None:
    ranks, own = 300, 100
    rank = np.repeat(np.arange(ranks), own + 1)
    collective = np.where(np.tile(np.arange(own + 1), ranks) == own, 0, 1 + np.arange(len(rank)))
    order = np.lexsort((rank, collective))
    rows = [(step, 0, done, done, done) for step, done in zip(collective[order], 7 * rank[order] + 10**9, strict=True)]
    span_rank, columns = spans(rank[order].tolist(), rows)
    tracemalloc.start()
    shifts, noise = offsets(span_rank, columns)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (shifts, noise) == ({number: -7 * number for number in range(ranks)}, 0)
    assert peak < 20 * columns.table.nbytes


@pytest.mark.parametrize(("gap", "steps", "more"), [(0, 1, 0), (1, 1, 5), (7, 1, 11), (7, 10, 11), (7, 11, 0)])
def test_a_window_is_widened_if_step_numbers_have_parted_by_more_than_its_size(gap: int, steps: int, more: int) -> None:
    rank, step = np.tile([0, 1], steps), np.repeat(np.arange(steps), 2)
    assert steps_to_add(steps_of(rank, step, step + gap * rank)) == more


def test_steps_without_a_collective_do_not_widen_the_window() -> None:
    assert steps_to_add(steps_of(np.array([0, 1]), np.array([3, 3]), np.array([wire.UNKNOWN, 3]))) == 0
    assert steps_to_add(steps_of(np.array([0]), np.array([3]), np.array([wire.UNKNOWN]))) == 0


def test_spans_of_missing_steps_are_ignored() -> None:
    rank, columns = shared_ends([step * 10**8 for step in range(50)])
    late = with_columns(columns, done_ns=columns.done_ns + 10**6 * ((rank == 1) & (columns.step < 40)))
    present = columns.step >= 40
    shifts, _ = offsets_ns(steps_of(rank[present], columns.step[present], columns.step[present]), (rank, late))
    assert shifts[1] == -AHEAD[1]
