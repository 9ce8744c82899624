"""Runs that hang by real means: the right rank, kind and place, in the collector and in the log."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.launch import HANGING, Ranks, ranks_of
from tests.server.batches import get

CASES = [
    ("loader", "absent", [1], "data", "__getitem__"),
    ("fewer-batches", "absent", [1], "code", "hanging.py"),
    ("skip-batch", None, [1], None, None),
    ("evaluate-alone", None, [1], None, None),
    ("lock", "absent", [1], "code", "wait_for_a_lock"),
    ("stop", "stopped", [1], None, None),
    ("all-in-data", "input", None, "data", "__getitem__"),
]
"""Case, kind of the hang, ranks that the others wait for, their activity, a part of their place."""
HEALTHY = ["first-step", "checkpoint", "evaluation", "slow"]
LIMIT_S = 40
"""For a full machine; `benchmarks/hangs.py` measures the time."""


def hang_of(url: str, run: str) -> dict[str, Any] | None:
    """The run's `hang` finding."""
    try:
        findings = get(url, f"/runs/{run}/diagnostics")["findings"]
    except AssertionError:  # The run has sent nothing yet.
        return None
    return next((f for f in findings if f["code"] == "hang" and f["severity"] == "critical"), None)


def wait_for(condition: Callable[[], Any], ranks: Ranks, limit_s: float = LIMIT_S) -> Any:
    deadline = time.monotonic() + limit_s
    while not (result := condition()):
        assert time.monotonic() < deadline, ranks.logs()
        time.sleep(0.5)
    return result


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("case", "kind", "slow", "activity", "place"), CASES, ids=[case for case, *_ in CASES])
def test_a_hang_is_named_with_its_rank_and_place(  # noqa: PLR0917 - the facts of one case
    case: str,
    kind: str | None,
    slow: list[int] | None,
    activity: str | None,
    place: str | None,
    world_size: int,
    url: str,
    tmp_path: Path,
) -> None:
    run = f"hang-{case}-{world_size}"
    environ = {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": run, "STEPS": "60" if case == "skip-batch" else "10000"}
    with ranks_of(HANGING, case, ranks=world_size, folder=tmp_path, environ=environ) as ranks:
        ranks.wait_for_fault()
        if case == "stop":
            os.kill(ranks.processes[1].pid, signal.SIGSTOP)
        finding = wait_for(lambda: hang_of(url, run), ranks)
        assert finding["ranks"] == (slow if slow is not None else list(range(world_size))), finding
        assert kind in {None, finding["evidence"]["kind"]}, finding
        if place is not None:
            assert place in finding["title"], finding
        if activity is not None:
            assert finding["evidence"]["activities"][str(finding["ranks"][0])] == activity
        wait_for(lambda: get(url, f"/runs/{run}")["state"] == "hung", ranks)
        wait_for(lambda: finding["title"].split(" (")[0].split(" for ")[0] in ranks.logs(), ranks)


@pytest.mark.parametrize("case", HEALTHY)
def test_a_run_that_only_takes_long_does_not_hang(case: str, url: str, tmp_path: Path) -> None:
    run = f"healthy-{case}"
    environ = {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": run, "STEPS": "80", "PAUSE_S": "14"}
    with ranks_of(HANGING, case, ranks=2, folder=tmp_path, environ=environ) as ranks:
        while any(process.poll() is None for process in ranks.processes):
            assert hang_of(url, run) is None, hang_of(url, run)
            time.sleep(0.5)
        assert [process.returncode for process in ranks.processes] == [0, 0], ranks.logs()
        assert "hang" not in ranks.logs()
