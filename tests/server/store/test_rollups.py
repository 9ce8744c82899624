"""Both algorithms for sums of buckets against a plain loop over rows."""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from ddpobs_server.store.sums import irregular_bucket_sums, rollups
from hypothesis import given
from hypothesis import strategies as st

from ddpobs import wire
from tests.support.columns import make_spans, make_steps

Row = tuple[int, int, int, int, int, int, int]


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Steps of one or two modules with changing layouts; buckets repeat and become ready in any order."""
    patterns = draw(st.lists(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=3)))
    drawn_rows = []
    for step, modules in enumerate(patterns):
        for module, revision in modules:
            for bucket in draw(st.lists(st.integers(0, 2), min_size=1, max_size=3)):
                ready, launch, comm = draw(st.tuples(*[st.integers(0, 50)] * 3))
                drawn_rows.append((step * 3, module, revision, bucket, ready, ready + launch, ready + launch + comm))
    return drawn_rows


@pytest.mark.parametrize("least", [1, 64])
@given(batches=st.lists(rows(), min_size=1, max_size=4))
def test_sums_by_bucket_equal_those_of_a_loop_over_rows(least: int, batches: list[list[Row]]) -> None:
    expected: dict[tuple[int, ...], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for batch, batch_rows in enumerate(batches):
        groups = [list(group) for _, group in groupby(batch_rows, key=lambda row: row[:3])]
        for group, last_ready in zip(groups, _last_ready(groups), strict=True):
            previous = None
            for _, module, revision, bucket, ready, launched, done in sorted(group, key=lambda row: row[4]):
                exposed = max(0, done - max(launched, last_ready))
                values = (1, 0 if previous is None else ready - previous, done - launched, exposed)
                _count(expected[batch, module, revision, bucket], values)
                previous = ready

    result: dict[tuple[int, ...], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    with patch.object(rollups, "_MIN_ROWS", least):
        sums = rollups.sum_buckets(*rollups.join([_spans(batch_rows) for batch_rows in batches]), [None] * len(batches))
    for key, table in sums.items():
        assert (np.diff(table[0]) > 0).all()
        for bucket, *row in table.T.astype(int).tolist():
            _count(result[*key, bucket], tuple(row))
    assert result == expected


def _numbered(*collective: int) -> wire.Steps:
    return make_steps(collective=collective)


def _last_ready(groups: list[list[Row]]) -> list[int]:
    """Last readiness in each module's backward. A module begins a new backward if all modules before it are done."""
    last = [0] * len(groups)
    for step in {group[0][0] for group in groups}:
        backward: list[int] = []
        for index in sorted(range(len(groups)), key=lambda index: min(row[4] for row in groups[index])):
            if groups[index][0][0] != step:
                continue
            done = max((row[6] for module in backward for row in groups[module]), default=0)
            if min(row[4] for row in groups[index]) >= done:
                backward = []
            backward.append(index)
            for module in backward:
                last[module] = max(row[4] for member in backward for row in groups[member])
    return last


def test_a_later_backward_hides_no_communication_of_an_earlier_backward() -> None:
    """As in a GAN: the discriminator's bucket is ready at 10 and reduced at 40, the generator's is ready at 80."""
    rows = [row for step in range(3) for row in ((step, 0, 0, 0, 10, 10, 40), (step, 1, 0, 0, 80, 80, 85))]
    sums = rollups.sum_buckets(*rollups.join([_spans(rows)]), [_numbered(1, 3, 5)])
    assert {module: table[-1].sum() for (_, module, _), table in sums.items()} == {0: 3 * 30, 1: 3 * 5}


def test_a_modules_backward_hides_another_modules_communication() -> None:
    """The decoder's bucket is ready at 10 and reduced at 40, while the encoder's gradient is ready at 80."""
    rows = [row for step in range(3) for row in ((step, 0, 0, 0, 10, 10, 40), (step, 1, 0, 0, 80, 80, 85))]
    sums = rollups.sum_buckets(*rollups.join([_spans(rows)]), [_numbered(1, 2, 3)])
    assert {module: table[-1].sum() for (_, module, _), table in sums.items()} == {0: 0, 1: 3 * 5}


def test_alternating_steps_form_a_grid_per_pattern() -> None:
    """As in a GAN: each pattern is summed once for all its steps."""
    rows = [(step, step % 2, 0, bucket, 10, 20, 30) for step in range(1000) for bucket in range(2 + step % 2)]
    grids, irregular = _split(rows)
    assert ([(len(grid), width) for grid, width in grids], irregular) == ([(1000, 2), (1500, 3)], None)


@pytest.mark.parametrize(
    "rows",
    [
        [(step, step % 50, step // 50, 0, 10, 20, 30) for step in range(2500)],
        [(step, 0, 0, step, 10, 20, 30) for step in range(2500)],
        [(0, index % 2, 0, 2500 - index, 10, 20, 30) for index in range(2500)],
        [(step, 0, 0, bucket, 10, 20, 30) for step in range(60) for bucket in range(step)],
    ],
    ids=["layouts", "buckets", "modules", "widths"],
)
def test_steps_with_different_buckets_are_irregular(rows: list[Row]) -> None:
    grids, irregular = _split(rows)
    assert (grids, np.arange(len(rows))[irregular].tolist()) == ([], list(range(len(rows))))
    sums = rollups.sum_buckets(*rollups.join([_spans(rows)]), [None])
    assert sum(table[1].sum() for table in sums.values()) == len(rows)


def test_a_few_irregular_steps_leave_the_other_steps_in_a_grid() -> None:
    rows = [(step, 0, int(step == 7), bucket, 10, 20, 30) for step in range(1000) for bucket in range(2)]
    ((grid, width),), irregular = _split(rows)
    assert (len(grid), width, irregular.tolist()) == (1998, 2, [14, 15])


def _split(rows: list[Row]) -> tuple[list[tuple[Any, int]], Any]:
    spans = _spans(rows)
    return rollups._split_grids(spans, np.flatnonzero(irregular_bucket_sums.changes(spans.step)))


def _spans(rows: list[Row]) -> wire.Spans:
    columns = np.array(rows, np.int64).reshape(-1, 7).T
    names = ("step", "module", "revision", "bucket", "ready_ns", "launched_ns", "done_ns")
    return make_spans(**dict(zip(names, columns, strict=True)), started_ns=wire.UNKNOWN)


def _count(sums: list[int], values: tuple[int, ...]) -> None:
    sums[:] = [sum(pair) for pair in zip(sums, values, strict=True)]


@pytest.mark.parametrize("least", [1, 64])
def test_a_collective_of_a_unit_is_exposed_for_as_long_as_training_waited_for_it(least: int) -> None:
    rows = [(step, 0, 0, bucket, 10, 20, 60) for step in range(3) for bucket in range(2)]
    spans = _spans(rows)
    waited = wire.Spans(**spans.by_name() | {"waited_ns": np.array([5, 0] * 3)})
    with patch.object(rollups, "_MIN_ROWS", least):
        (table,) = rollups.sum_buckets(*rollups.join([waited]), [None]).values()
    assert table[-1].tolist() == [15, 0]
