"""Runs that hang by real means: the right rank, kind and place, in the collector and in the log."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.cases import CASES, HEALTHY
from benchmarks.faults.launch import HANGING, ranks_of
from benchmarks.rig import patience
from tests.support.server.batches import get

ACTIVITIES = {"loader": "data", "all-in-data": "data", "fewer-batches": "code", "lock": "code"}
"""What the named ranks do; `cases.py` has the kind, the ranks and the sentence."""


def hang_of(url: str, run: str) -> dict[str, Any] | None:
    """The run's `hang` finding."""
    try:
        findings = get(url, f"/runs/{run}/diagnostics")["findings"]
    except AssertionError:  # The run has sent nothing yet.
        return None
    return next((f for f in findings if f["code"] == "hang" and f["severity"] == "critical"), None)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.wide), 4])
@pytest.mark.parametrize(
    "name", [case.name for case in CASES.values() if not case.cuts and not case.environ.get("WORKERS")]
)
def test_a_hang_is_named_with_its_rank_and_place(name: str, world_size: int, url: str, tmp_path: Path) -> None:
    run, case = f"hang-{name}-{world_size}", CASES[name]
    with case.training(tmp_path, world_size, {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": run}) as (ranks, _):
        finding = patience.until(lambda: hang_of(url, run), ranks.logs)
        assert (finding["evidence"]["kind"], finding["ranks"]) == (case.kind, case.culprits(world_size)), finding
        assert case.pattern(world_size).search(finding["title"]), finding
        if name == "fewer-batches":
            assert "bucket 0.0: 5." in finding["where"]
        if name in ACTIVITIES:
            assert finding["evidence"]["activities"][str(finding["ranks"][0])] == ACTIVITIES[name]
        patience.until(lambda: get(url, f"/runs/{run}")["state"] == "hung", ranks.logs)
        patience.until(lambda: case.pattern(world_size).search(ranks.logs()), ranks.logs)
        if name == "stop":
            os.kill(ranks.processes[1].pid, signal.SIGCONT)
            patience.until(lambda: "the run goes on after" in ranks.logs(), ranks.logs)
            patience.until(lambda: hang_of(url, run) is None, ranks.logs)


@pytest.mark.parametrize("case", HEALTHY)
def test_a_run_that_only_takes_long_does_not_hang(case: str, url: str, tmp_path: Path) -> None:
    run = f"healthy-{case}"
    environ = {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": run, "STEPS": "80", "PAUSE_S": "14"}
    with ranks_of(HANGING, case, ranks=2, folder=tmp_path, environ=environ) as ranks:
        while any(process.poll() is None for process in ranks.processes):
            assert hang_of(url, run) is None, hang_of(url, run)
            time.sleep(0.5)
        assert [process.returncode for process in ranks.processes] == [0, 0], ranks.logs()
        logs = ranks.logs()
        assert "hang" not in logs
        outside_of_the_box = "\n".join(line for line in logs.splitlines() if not line.startswith("│"))
        for words in ("Rank", "rank 1", "waits", "goes on after"):
            assert words not in outside_of_the_box
