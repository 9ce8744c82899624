"""Logs in the form that the README of NCCL Inspector describes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
