"""The verdict through a real store: one client per rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from ddpobs import wire
from ddpobs.ranks.hang_report import HangReport, process_state


def pulse(activity: str = "bucket", idle_s: float = 12, **facts: Any) -> wire.Pulse:
    fields: dict[str, Any] = {"phase": "backward", "step": 4, "module": 0, "bucket": 1, "synchronised": 4}
    fields |= {"activity": activity, **facts}
    return wire.Pulse(at_ns=0, idle_ns=int(idle_s * 1e9), patience_ns=8 * 10**9, **fields)


@pytest.fixture
def store() -> Any:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def reports(store: Any, ranks: int) -> list[HangReport]:
    return [HangReport(store, rank, ranks) for rank in range(ranks)]


def test_the_lowest_rank_judges_and_names_the_rank_that_does_not_wait(store: Any) -> None:
    ranks = reports(store, 3)
    for rank, report in enumerate(ranks):
        report.publish(pulse("data", place="train.py:3") if rank == 2 else pulse())
    hang = ranks[0].judge()
    assert hang is not None
    assert (hang.kind, hang.ranks, hang.waiting) == ("absent", [2], [0, 1])
    assert [report.judge() for report in ranks[1:]] == [None, None]


def test_a_rank_without_telemetry_prevents_a_verdict(store: Any) -> None:
    ranks = reports(store, 2)
    ranks[0].publish(pulse())
    assert ranks[0].judge() is None


def test_a_stopped_and_a_dead_process_of_this_host_are_told_apart(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        ranks = reports(store, 2)
        ranks[0].publish(pulse())
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: child.pid)
            ranks[1].publish(pulse("code", idle_s=0))
        assert ranks[0].judge() is None
        child.send_signal(signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])
        hang = ranks[0].judge()
        assert hang is not None
        assert (hang.kind, hang.ranks, ranks[0].processes) == ("stopped", [1], {1: "stopped"})
        child.kill()
        child.wait()
        hang = ranks[0].judge()
        assert hang is not None
        assert (hang.kind, ranks[0].processes) == ("dead", {1: "gone"})
    finally:
        child.kill()
        child.wait()


def test_a_rank_of_another_host_whose_key_stays_the_same_is_silent(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = reports(store, 2)
    ranks[1]._host = "another"
    for report in ranks:
        report.publish(pulse("bucket" if report is ranks[0] else "code"))
    clock = [time.monotonic_ns()]
    monkeypatch.setattr("ddpobs.ranks.hang_report.time.monotonic_ns", lambda: clock[0])
    first = ranks[0].judge()
    assert first is not None
    assert first.kind == "absent"
    clock[0] += 8 * 10**9
    ranks[0].publish(pulse())
    hang = ranks[0].judge()
    assert hang is not None
    assert hang.kind == "stopped"
    assert hang.cause.startswith("rank 1 sent nothing for 8 s")


def test_the_next_rank_judges_where_rank_0_has_ended(store: Any) -> None:
    ranks = reports(store, 2)
    ranks[0].publish(None, ended="finished")
    ranks[1].publish(pulse())
    hang = ranks[1].judge()
    assert hang is not None
    assert hang.cause.startswith("rank 0 has ended its training; rank 1 waits in bucket 0.1 of step 4")


def test_this_process_runs() -> None:
    assert process_state(os.getpid()) == ""
