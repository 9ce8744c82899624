"""Sums of buckets against a plain loop over rows."""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from ddpobs_server.store import irregular_bucket_sums, rollups
from hypothesis import given
from hypothesis import strategies as st

from ddpobs import wire
from tests.columns import make_spans, make_steps

Row = tuple[int, int, int, int, int, int, int]


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Steps of one or two modules whose layouts change, buckets in any order, one perhaps twice, ready in any order."""
    patterns = draw(st.lists(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=3)))
    found = []
    for step, modules in enumerate(patterns):
        for module, revision in modules:
            for bucket in draw(st.lists(st.integers(0, 2), min_size=1, max_size=3)):
                ready, launch, comm = draw(st.tuples(*[st.integers(0, 50)] * 3))
                found.append((step * 3, module, revision, bucket, ready, ready + launch, ready + launch + comm))
    return found


@pytest.mark.parametrize("least", [1, 64])
@given(batches=st.lists(rows(), min_size=1, max_size=4))
def test_sums_by_bucket_are_those_of_a_loop_over_rows(least: int, batches: list[list[Row]]) -> None:
    expected: dict[tuple[int, ...], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for batch, found in enumerate(batches):
        groups = [list(group) for _, group in groupby(found, key=lambda row: row[:3])]
        for group, last_ready in zip(groups, _last_ready(groups), strict=True):
            before = None
            for _, module, revision, bucket, ready, launched, done in sorted(group, key=lambda row: row[4]):
                exposed = max(0, done - max(launched, last_ready))
                own = (1, 0 if before is None else ready - before, done - launched, exposed)
                _count(expected[batch, module, revision, bucket], own)
                before = ready

    got: dict[tuple[int, ...], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    with patch.object(rollups, "_LEAST_ROWS", least):
        sums = rollups.bucket_sums(*rollups.join([_spans(found) for found in batches]), [None] * len(batches))
    for key, table in sums.items():
        assert (np.diff(table[0]) > 0).all()
        for bucket, *row in table.T.astype(int).tolist():
            _count(got[*key, bucket], tuple(row))
    assert got == expected


def _numbered(*collective: int) -> wire.Steps:
    return make_steps(collective=collective)


def _last_ready(groups: list[list[Row]]) -> list[int]:
    """Of each module's backward: one that begins when all before it in its step are done begins another."""
    last = [0] * len(groups)
    for step in {group[0][0] for group in groups}:
        together: list[int] = []
        for place in sorted(range(len(groups)), key=lambda place: min(row[4] for row in groups[place])):
            if groups[place][0][0] != step:
                continue
            if min(row[4] for row in groups[place]) >= max(
                (row[6] for one in together for row in groups[one]), default=0
            ):
                together = []
            together.append(place)
            for one in together:
                last[one] = max(row[4] for other in together for row in groups[other])
    return last


def test_a_backward_after_anothers_hides_nothing_of_it() -> None:
    """A GAN's: the discriminator's bucket, ready at 10 and reduced at 40; then the generator's, ready at 80."""
    found = [row for step in range(3) for row in ((step, 0, 0, 0, 10, 10, 40), (step, 1, 0, 0, 80, 80, 85))]
    sums = rollups.bucket_sums(*rollups.join([_spans(found)]), [_numbered(1, 3, 5)])
    assert {module: table[-1].sum() for (_, module, _), table in sums.items()} == {0: 3 * 30, 1: 3 * 5}


def test_one_modules_backward_hides_anothers_communication() -> None:
    """The decoder's, ready at 10 and reduced at 40, under the encoder's, whose gradient comes at 80."""
    found = [row for step in range(3) for row in ((step, 0, 0, 0, 10, 10, 40), (step, 1, 0, 0, 80, 80, 85))]
    sums = rollups.bucket_sums(*rollups.join([_spans(found)]), [_numbered(1, 2, 3)])
    assert {module: table[-1].sum() for (_, module, _), table in sums.items()} == {0: 0, 1: 3 * 5}


def test_steps_that_alternate_are_not_taken_one_by_one() -> None:
    """As a GAN's: what is done for each pattern is done once for all its steps."""
    found = [(step, step % 2, 0, bucket, 10, 20, 30) for step in range(1000) for bucket in range(2 + step % 2)]
    grids, rest = _alike(found)
    assert ([(len(rows), width) for rows, width in grids], rest) == ([(1000, 2), (1500, 3)], None)


@pytest.mark.parametrize(
    "found",
    [
        [(step, step % 50, step // 50, 0, 10, 20, 30) for step in range(2500)],
        [(step, 0, 0, step, 10, 20, 30) for step in range(2500)],
        [(0, place % 2, 0, 2500 - place, 10, 20, 30) for place in range(2500)],
        [(step, 0, 0, bucket, 10, 20, 30) for step in range(60) for bucket in range(step)],
    ],
    ids=["layouts", "buckets", "modules", "widths"],
)
def test_steps_of_which_each_has_others_are_added_up_together(found: list[Row]) -> None:
    grids, rest = _alike(found)
    assert (grids, np.arange(len(found))[rest].tolist()) == ([], list(range(len(found))))
    sums = rollups.bucket_sums(*rollups.join([_spans(found)]), [None])
    assert sum(table[1].sum() for table in sums.values()) == len(found)


def test_a_few_steps_of_their_own_do_not_keep_others_from_being_added_up_as_they_are_alike() -> None:
    found = [(step, 0, int(step == 7), bucket, 10, 20, 30) for step in range(1000) for bucket in range(2)]
    ((rows, width),), rest = _alike(found)
    assert (len(rows), width, rest.tolist()) == (1998, 2, [14, 15])


def _alike(found: list[Row]) -> tuple[list[tuple[Any, int]], Any]:
    spans = _spans(found)
    return rollups._alike(spans, np.flatnonzero(irregular_bucket_sums.changes(spans.step)))


def _spans(found: list[Row]) -> wire.Spans:
    columns = np.array(found, np.int64).reshape(-1, 7).T
    names = ("step", "module", "revision", "bucket", "ready_ns", "launched_ns", "done_ns")
    return make_spans(**dict(zip(names, columns, strict=True)), started_ns=wire.UNKNOWN)


def _count(sums: list[int], own: tuple[int, ...]) -> None:
    sums[:] = [sum(pair) for pair in zip(sums, own, strict=True)]
