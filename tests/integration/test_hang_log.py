"""Runs that hang by real means, without a collector: the sentence in a surviving rank's log.

`test_hangs.py` reads the log of every other kind of hang, beside the collector's finding.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from benchmarks.faults.cases import CASES
from benchmarks.faults.launch import HANGING, Ranks, ranks_of
from benchmarks.links import LinkError
from benchmarks.rig import patience

pytestmark = pytest.mark.wide

ABSENT = "http://127.0.0.1:9"
"""No collector listens there."""


def wait_for(pattern: re.Pattern[str], ranks: Ranks) -> None:
    deadline = time.monotonic() + patience.HANG_S
    while not pattern.search(ranks.logs()):
        assert time.monotonic() < deadline, f"no {pattern.pattern} in\n{ranks.logs()}"
        time.sleep(0.3)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.wide), 4])
@pytest.mark.parametrize("case", ["loader-worker", "two-threads", "cut-link", "cut-host"])
def test_a_surviving_rank_logs_the_verdict(case: str, world_size: int, tmp_path: Path) -> None:
    try:
        with CASES[case].training(tmp_path, world_size, {"DDPOBS_TELEMETRY": ABSENT}) as (ranks, _):
            wait_for(CASES[case].pattern(world_size), ranks)
    except LinkError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("case", ["lock", "evaluate-alone"])
def test_an_attached_rank_logs_the_same_verdict(case: str, tmp_path: Path) -> None:
    environ = {"DDPOBS_TELEMETRY": ABSENT, "ATTACHED": "1"}
    with CASES[case].training(tmp_path, 2, environ) as (ranks, _):
        wait_for(CASES[case].pattern(2), ranks)


def test_a_killed_rank_is_a_crash_of_the_others_and_no_hang(tmp_path: Path) -> None:
    """Gloo raises on the survivors because their connection ends. No rank waits."""
    with ranks_of(HANGING, "kill", ranks=2, folder=tmp_path, environ={"DDPOBS_TELEMETRY": ABSENT}) as ranks:
        ranks.wait_for_fault()
        os.kill(ranks.processes[1].pid, signal.SIGKILL)
        assert ranks.processes[0].wait(patience.HANG_S) != 0
        assert "RuntimeError" in ranks.logs()
        assert "is gone" not in ranks.logs()
