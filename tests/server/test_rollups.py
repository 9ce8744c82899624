"""Sums of buckets against a plain loop over rows."""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby

import numpy as np
from ddpobs_server.store import rollups
from hypothesis import given
from hypothesis import strategies as st

from ddpobs import wire

_NAMES = ("steps", "compute_ns", "comm_ns", "exposed_ns")
Row = tuple[int, int, int, int, int, int, int]


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Steps of one or two modules whose layouts change, buckets ready in any order."""
    patterns = draw(st.lists(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=3)))
    found = []
    for step, modules in enumerate(patterns):
        for module, revision in modules:
            for bucket in range(draw(st.integers(1, 3))):
                ready, launch, comm = draw(st.tuples(*[st.integers(0, 50)] * 3))
                found.append((step * 3, module, revision, bucket, ready, ready + launch, ready + launch + comm))
    return found


@given(rows())
def test_sums_by_bucket_are_those_of_a_loop_over_rows(found: list[Row]) -> None:
    expected: dict[tuple[int, int, int], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for _, group in groupby(found, key=lambda row: row[:3]):
        before, together = None, sorted(group, key=lambda row: row[4])
        for _, module, revision, bucket, ready, launched, done in together:
            exposed = max(0, done - max(launched, together[-1][4]))
            own = (1, 0 if before is None else ready - before, done - launched, exposed)
            sums = expected[module, revision, bucket]
            sums[:] = [sum(pair) for pair in zip(sums, own, strict=True)]
            before = ready

    columns = np.array(found, np.int64).reshape(-1, 7).T
    names = ("step", "module", "revision", "bucket", "ready_ns", "launched_ns", "done_ns")
    spans = wire.Spans(**dict(zip(names, columns, strict=True)), started_ns=np.full(len(found), wire.UNKNOWN))
    got = {
        (row["module"], row["revision"], row["bucket"]): [row[name] for name in _NAMES]
        for row in rollups.bucket_sums(spans)
    }
    assert got == expected


def test_steps_that_alternate_are_not_taken_one_by_one() -> None:
    """As a GAN's: what is done for each pattern is done once for all its steps."""
    found = [(step, step % 2, 0, bucket, 10, 20, 30) for step in range(1000) for bucket in range(2 + step % 2)]
    names = ("step", "module", "revision", "bucket", "ready_ns", "launched_ns", "done_ns")
    columns = np.array(found, np.int64).T
    spans = wire.Spans(**dict(zip(names, columns, strict=True)), started_ns=columns[0] * 0 + wire.UNKNOWN)
    assert len(list(rollups._alike(spans))) == 2
