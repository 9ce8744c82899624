"""`benchmarks.faults.fork_server`: processes are told apart, and end with their server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.faults.fork_server import ForkedRank, ForkServer
from benchmarks.rig import leftovers, patience

LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
TRIES = 100
"""Other programs may take a pid first."""


@pytest.fixture
def server() -> Iterator[ForkServer]:
    running = ForkServer(os.environ, ())
    yield running
    running.close()


def start(server: ForkServer, code: str, folder: Path) -> ForkedRank:
    (script := folder / "script.py").write_text(code)
    return server.start([str(script)], os.environ, folder, folder / "log")


def start_with(server: ForkServer, pid: int, folder: Path) -> ForkedRank:
    """Start a process that waits, with a pid that is free."""
    for _ in range(TRIES):
        LAST_PID.write_text(f"{pid - 1}")
        process = start(server, "import time; time.sleep(600)", folder)
        if process.pid == pid:
            return process
        process.kill()
    raise AssertionError(f"{pid} was taken {TRIES} times")


def test_a_process_is_not_taken_for_an_earlier_one_with_its_pid(server: ForkServer, tmp_path: Path) -> None:
    if not os.access(LAST_PID, os.W_OK):
        pytest.skip("only root chooses a pid")
    ended = start(server, "raise SystemExit(3)", tmp_path)
    assert ended.wait(patience.HANG_S) == 3
    process = start_with(server, ended.pid, tmp_path)
    assert process.poll() is None
    process.kill()
    assert process.wait(patience.HANG_S) == -9
    assert ended.poll() == 3


def test_processes_end_with_their_server(server: ForkServer, tmp_path: Path) -> None:
    """The second one may still be about to begin a session of its own."""
    pids = {start(server, "import time; time.sleep(600)", tmp_path).pid for _ in range(2)}
    server.close()
    patience.until(lambda: pids.isdisjoint(leftovers.started(os.environ[leftovers.MARK])))
