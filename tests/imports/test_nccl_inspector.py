"""Logs in the form that the README of NCCL Inspector describes: steps by what recurs, and who arrived last."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpobs.errors import TraceFileError
from ddpobs.imports.files import encoded, read
from ddpobs.imports.traced_run import TracedRun

SIZES = (2**20, 25 * 2**20, 25 * 2**20)
STEPS, STEP_US, MOVED_US = 8, 100_000, 4_000
LATE_US = 30_000


def lines(rank: int, late: int, verbose: bool = True) -> Iterator[dict[str, Any]]:
    """A broadcast and three all-reduces in each step; the late rank launches its all-reduces later."""
    number = 0
    for step in range(STEPS):
        at_us = 10**15 + step * (STEP_US + LATE_US)
        yield line(rank, number, "Broadcast", 2**14, (at_us, at_us, at_us + 100), verbose=verbose)
        for bucket, size in enumerate(SIZES):
            number += 1
            begin_us = at_us + 50_000 + 10_000 * bucket
            launched_us = begin_us + LATE_US * (rank == late)
            ended_us = begin_us + LATE_US + MOVED_US
            yield line(rank, number, "AllReduce", size, (launched_us, launched_us + 10, ended_us), verbose=verbose)
        number += 1


def line(
    rank: int, number: int, kind: str, size: int, times_us: tuple[int, int, int], *, verbose: bool
) -> dict[str, Any]:
    launched_us, started_us, ended_us = times_us
    kernels = [{"channel_id": 0, "kernel_start_ts": started_us, "kernel_stop_ts": ended_us, "kernel_record_ts": 0}]
    times = {"event_trace_ts": {"coll_start_ts": launched_us, "coll_stop_ts": launched_us, "kernel_events": kernels}}
    return {
        "header": {"id": "0x7f8c496ae9f661", "rank": rank, "n_ranks": 2, "nnodes": 1},
        "metadata": {"inspector_output_format_version": "v4.0", "hostname": "node", "pid": 1},
        "coll_perf": {
            "coll": kind,
            "coll_sn": number,
            "coll_msg_size_bytes": size,
            "coll_exec_time_us": ended_us - started_us,
        }
        | (times if verbose else {}),
    }


def write(folder: Path, rank: int, written: list[dict[str, Any]]) -> Path:
    path = folder / f"node-pid{rank}.log"
    path.write_text("".join(json.dumps(one) + "\n" for one in written))
    return path


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
