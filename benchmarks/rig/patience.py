"""Waiting that ends: for a command with all processes that it starts, and for a condition."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.rig.leftovers import MARK, kill, new_mark, started

HANG_S = 400
"""Longest wait for a process: only a hang takes as long, however full the machine is."""


def run(
    command: Sequence[str | Path], *, environ: Mapping[str, str], timeout_s: float = HANG_S, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command and return its exit status and output, as `subprocess.run` does.

    Args:
        command: The program and its arguments.
        environ: The environment of all processes.
        timeout_s: Longest duration of the command and of other processes with its output streams, in seconds.
        **options: Other arguments of `subprocess.Popen`.

    Raises:
        AssertionError: The time has run out. The message holds the output, which ends with the stacks of all remaining
            processes.
    """
    mark = new_mark()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environ = {**environ, MARK: mark, "PYTHONFAULTHANDLER": "1"}
    process = subprocess.Popen(list(command), text=True, env=environ, **pipes | options)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # The youngest first, because a parent that gets the signal would end its children.
        for number in (signal.SIGABRT, signal.SIGKILL):
            for pid in sorted(started(mark), reverse=True):
                _end(pid, number, mark)
        out, err = process.communicate(timeout=60)
        raise AssertionError(f"{command[0]} did not end within {timeout_s} s:\n{out or ''}\n{err or ''}") from None
    except BaseException:  # The test's own time is over.
        kill(mark)
        process.wait()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def until(condition: Callable[[], Any], logs: Callable[[], str] = str, limit_s: float = HANG_S) -> Any:
    """Wait until a condition holds, and return its value.

    The condition is asked for less often the longer it takes: some ask a collector that shares the processors.

    Args:
        condition: Returns a true value once it holds.
        logs: Returns what the message of the error ends with.
        limit_s: Longest wait.

    Raises:
        AssertionError: It did not hold in time.
    """
    began = time.monotonic()
    while not (value := condition()):
        waited_s = time.monotonic() - began
        assert waited_s < limit_s, f"the condition did not hold within {limit_s} s\n{logs()}"
        time.sleep(min(0.02 + waited_s / 20, 0.5))
    return value


def _end(pid: int, number: signal.Signals, mark: str) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    deadline = time.monotonic() + 5
    while pid in started(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
