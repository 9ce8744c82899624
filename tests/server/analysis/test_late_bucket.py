"""The bucket in which a slow backward falls behind is found from the spans of the late steps."""

from __future__ import annotations

import numpy as np
import pytest
from ddpobs_server.analysis.slow_ranks.bucket import backward_began_ns, late_bucket

from ddpobs import wire
from tests.support.analysis.scenario import MS, columns, own_times, spans, with_columns


def test_the_start_of_backward_is_defined_if_the_step_is_present_and_has_one_micro_step() -> None:
    rank, steps = columns(own_times(4, 3, seed=1))
    steps = with_columns(steps, micro_steps=np.where((steps.step == 2) & (rank == 1), 2, 1))
    rows = [(step, bucket, step * 100 + bucket, 0, 0) for step in range(1, 5) for _ in range(3) for bucket in (0, 1)]
    span_rank, cut = spans([r for _ in range(4) for r in range(3) for _ in range(2)], rows)
    began = backward_began_ns((rank, steps), (span_rank, cut))
    for began_ns, step, r in zip(began.tolist(), cut.step.tolist(), span_rank.tolist(), strict=True):
        backward = steps.backward_ns[(steps.step == step) & (rank == r)]
        is_defined = step < 4 and (step, r) != (2, 1)
        assert began_ns == (step * 100 + 1 - int(backward[0]) if is_defined else wire.UNKNOWN)


def late_index(lag_by_bucket: list[int]) -> int | None:
    """Two ranks, 4 steps, a bucket every 10 ms; rank 1 lags by these milliseconds at each bucket."""
    rank, rows, began = [], [], []
    for step in range(4):
        for r in (0, 1):
            base = (step * 1000 + r * 777) * MS
            for bucket, lag in enumerate(lag_by_bucket):
                ready = base + ((bucket + 1) * 10 + r * lag) * MS
                rank.append(r)
                began.append(base)
                rows.append((step, bucket, ready, ready, ready + MS))
    result = late_bucket(1, *spans(rank, rows), np.array(began), max(lag_by_bucket) * MS)
    return None if result is None else result[2]


@pytest.mark.parametrize("late", [0, 1, 3])
def test_the_bucket_at_which_the_lag_appears_is_named(late: int) -> None:
    assert late_index([40 if bucket >= late else 0 for bucket in range(4)]) == late


def test_no_bucket_is_named_without_a_lag() -> None:
    assert late_index([0, 0, 0, 0]) is None


def test_no_bucket_is_named_when_the_whole_backward_is_slow() -> None:
    assert late_index([5 * (bucket + 1) for bucket in range(8)]) is None


def test_one_late_step_of_another_module_does_not_name_its_bucket() -> None:
    """Module 0 lags by 40 ms at its bucket 1 in 8 steps; module 1 by a spike of 90 ms in one step of its own."""
    rank, rows, began, module = [], [], [], []
    for step in range(9):
        for r in (0, 1):
            for bucket in (0, 1):
                lag = r * (90 if step == 8 else 40 * bucket)
                rank.append(r)
                began.append(step * 1000 * MS)
                module.append(int(step == 8))
                rows.append((step, bucket, (step * 1000 + 10 * (bucket + 1) + lag) * MS, 0, 0))
    span_rank, cut = spans(rank, rows)
    cut = with_columns(cut, module=np.array(module))
    assert late_bucket(1, span_rank, cut, np.array(began), 40 * MS) == (0, 0, 1)


def test_of_two_modules_in_one_backward_the_module_in_which_the_lag_arises_is_named() -> None:
    """Module 1's bucket lags by 40 ms, so all buckets of module 0 after it are as late."""
    rank, rows, module_of_row = [], [], []
    for step in range(4):
        for r in (0, 1):
            for index, module in enumerate((1, 0, 0)):
                rank.append(r)
                module_of_row.append(module)
                rows.append((step, max(0, index - 1), (step * 1000 + 10 * (index + 1) + 40 * r) * MS, 0, 0))
    span_rank, cut = spans(rank, rows)
    cut = with_columns(cut, module=np.array(module_of_row))
    assert late_bucket(1, span_rank, cut, cut.step * 1000 * MS, 40 * MS) == (1, 0, 0)


def test_no_bucket_with_less_than_half_of_the_excess_is_named() -> None:
    rank, rows = [0, 1] * 4, [(step, 0, (step * 1000 + 10 + 15 * r) * MS, 0, 0) for step in range(4) for r in (0, 1)]
    span_rank, cut = spans(rank, rows)
    began = cut.step * 1000 * MS
    assert late_bucket(1, span_rank, cut, began, 40 * MS) is None
    assert late_bucket(1, span_rank, cut, began, 30 * MS) == (0, 0, 0)


@pytest.mark.timeout(5)
def test_of_a_hundred_thousand_buckets_the_late_one_is_found_at_once() -> None:
    """A client may send as many: a search of all rows for each bucket would take ten seconds."""
    rank, bucket = np.repeat([0, 1], 100_000), np.tile(np.arange(100_000), 2)
    ready = (bucket + 1) * MS + 40 * MS * ((rank == 1) & (bucket >= 12_345))
    zeros = dict.fromkeys(wire.Spans.names, np.zeros_like(ready))
    cut = wire.Spans(**zeros | {"bucket": bucket, "ready_ns": ready})
    assert late_bucket(1, rank, cut, np.zeros_like(ready), 40 * MS) == (0, 0, 12_345)
