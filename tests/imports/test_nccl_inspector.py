"""Logs in the form that the README of NCCL Inspector describes: steps by what recurs, and who arrived last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpobs.errors import TraceFileError
from ddpobs.imports.files import encoded, read
from ddpobs.imports.traced_run import TracedRun
from tests.support.inspector_logs import SIZES, STEPS, lines, write


@pytest.mark.parametrize("late", [0, 1])
def test_the_rank_that_launched_last_is_named(tmp_path: Path, late: int) -> None:
    run = read([write(tmp_path, rank, list(lines(rank, late))) for rank in range(2)], "r")
    arrived = f"rank {late} arrived last in {STEPS - 1} of {STEPS - 1} steps: 30 ms after the others (median)"
    assert run.lines[0] == f"{STEPS} steps of ranks 0 and 1"
    assert run.lines[1].startswith(arrived)
    (first, _) = [batch for batch, _ in encoded(run)]
    assert [bucket.size_bytes for bucket in first.layouts[0].buckets] == list(SIZES)


def test_ranks_are_joined_by_the_numbers_of_their_collectives(tmp_path: Path) -> None:
    files = [write(tmp_path, 0, list(lines(0, 1))), write(tmp_path, 1, list(lines(1, 1))[6:])]
    run = read(files, "r")
    assert isinstance(run, TracedRun)
    assert [len(steps) for steps in run.steps] == [STEPS - 2, STEPS - 2]  # The second log begins in the second step.
    assert "30 ms after the others" in run.lines[1]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (list(lines(0, 1, verbose=False)), "times, which NCCL_INSPECTOR_DUMP_VERBOSE=1 writes"),
        (list(lines(0, 1))[:4], "a sequence of reductions that recurs: a step, got 3 reductions without"),
        (list(lines(0, 1))[:1], "a log with reductions of gradients"),
        ([*lines(0, 1), {"header": 3}], "in each line, got line 33: Expected `object`"),
    ],
)
def test_a_log_without_times_or_steps_is_refused(tmp_path: Path, written: list[dict[str, Any]], expected: str) -> None:
    with pytest.raises(TraceFileError, match=expected):
        read([write(tmp_path, 0, written)], "r")
