"""Runs that hang by real means, without a collector: the sentence in a surviving rank's log."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.faults.launch import HANGING, Ranks, ranks_of
from benchmarks.links import INTERFACE, LinkError, address, inside, links, namespace

ABSENT = "http://127.0.0.1:9"
"""No collector listens there."""
LIMIT_S = 60
"""For a full machine; `benchmarks/hangs.py` measures the time."""
PULSES_S = 5
"""Time in which each rank has published a pulse; a rank that stops earlier is not known to the others."""
CASES = {
    "loader": "Rank 1 has been in the data loader for * s (*hanging.py:* __getitem__). {others} in bucket 0 of step",
    "loader-worker": "Rank 1 has been in the data loader for * s (*hanging.py:*). {others} in bucket 0 of step",
    "fewer-batches": "Rank 1 has been in its own code for * s (*hanging.py:* main). {others} in bucket 0 of step 40: 5",
    "skip-batch": "Rank 1 has been in its own code for * s (*hanging.py:* main). {others} in bucket 0 of step 59",
    "evaluate-alone": "different collectives: *rank 1 in the broadcast of buffers of step 40 (*evaluate). Rank 1 ran",
    "extra-all-reduce": "different collectives: *rank 1 in all_reduce after step 40 (*at_fault)",
    "lock": "Rank 1 has been in its own code for * s (*hanging.py:* wait_for_a_lock). {others} in bucket 0 of step 40",
    "stop": "The process of rank 1 is stopped (last in * of step *). {others} in bucket",
    "all-in-data": "No rank gets a batch. {all} have been in the data loader for * s (*__getitem__)",
}
"""Sentence of each case; a star stands for any text."""
HEALTHY = ["first-step", "checkpoint", "evaluation", "slow"]


def others(world_size: int) -> str:
    return "Rank 0 waits" if world_size == 2 else "Ranks 0, 2 and 3 wait"


def everyone(world_size: int) -> str:
    return "Ranks 0 and 1" if world_size == 2 else "Ranks 0, 1, 2 and 3"


def wait_for(sentence: str, ranks: Ranks) -> None:
    pattern = re.compile("ddpobs: .*" + ".*".join(map(re.escape, sentence.split("*"))))
    deadline = time.monotonic() + LIMIT_S
    while not pattern.search(ranks.logs()):
        assert time.monotonic() < deadline, f"no {pattern.pattern} in\n{ranks.logs()}"
        time.sleep(0.3)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_surviving_rank_logs_the_verdict(case: str, world_size: int, tmp_path: Path) -> None:
    environ = {"DDPOBS_TELEMETRY": ABSENT, "STEPS": "60" if case == "skip-batch" else "10000"}
    environ |= {"WORKERS": "1"} if case == "loader-worker" else {}
    name = "loader" if case == "loader-worker" else case
    with ranks_of(HANGING, name, ranks=world_size, folder=tmp_path, environ=environ) as ranks:
        ranks.wait_for_fault()
        if case == "stop":
            time.sleep(PULSES_S)
            os.kill(ranks.processes[1].pid, signal.SIGSTOP)
        wait_for(CASES[case].format(others=others(world_size), all=everyone(world_size)), ranks)
        if case == "stop":
            os.kill(ranks.processes[1].pid, signal.SIGCONT)
            wait_for("the run goes on after * s", ranks)


def test_a_killed_rank_is_a_crash_of_the_others_and_no_hang(tmp_path: Path) -> None:
    """Gloo raises on the survivors, whose connection ends; nothing waits."""
    with ranks_of(HANGING, "kill", ranks=2, folder=tmp_path, environ={"DDPOBS_TELEMETRY": ABSENT}) as ranks:
        ranks.wait_for_fault()
        os.kill(ranks.processes[1].pid, signal.SIGKILL)
        assert ranks.processes[0].wait(LIMIT_S) != 0
        assert "RuntimeError" in ranks.logs()
        assert "is gone" not in ranks.logs()


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_behind_a_cut_link_is_named(world_size: int, tmp_path: Path) -> None:
    """The cut also parts the rank from the store, so that the others see only its silence."""
    environ = {"DDPOBS_TELEMETRY": ABSENT, "GLOO_SOCKET_IFNAME": INTERFACE}
    try:
        with (
            links(world_size, "1gbit"),
            ranks_of(
                HANGING,
                "cut-link",
                ranks=world_size,
                folder=tmp_path,
                environ=environ,
                inside=inside,
                master=address(0),
            ) as ranks,
        ):
            ranks.wait_for_fault()
            time.sleep(PULSES_S)
            subprocess.run(["ip", "-n", namespace(1), "link", "set", INTERFACE, "down"], check=True)
            wait_for(f"Rank 1 sent nothing for * s (last in * of step *). {others(world_size)} in bucket", ranks)
    except LinkError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("case", HEALTHY)
def test_a_run_that_only_takes_long_is_no_hang(case: str, tmp_path: Path) -> None:
    environ = {"DDPOBS_TELEMETRY": ABSENT, "STEPS": "80", "PAUSE_S": "14"}
    with ranks_of(HANGING, case, ranks=2, folder=tmp_path, environ=environ) as ranks:
        assert [process.wait(120) for process in ranks.processes] == [0, 0], ranks.logs()
        for word in ("Rank", "rank 1", "waits", "goes on after"):
            assert word not in ranks.logs()
