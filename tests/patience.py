"""Runs a command and all that it starts; what hangs says where."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_MARK = "TESTS_STARTED_BY"


def run(
    command: Sequence[str | Path], *, environ: Mapping[str, str], timeout_s: float, **given: Any
) -> subprocess.CompletedProcess[str]:
    """The command's end and what it printed, as `subprocess.run` gives them.

    Args:
        command: The program and its arguments.
        environ: The environment of all processes.
        timeout_s: How long the command, and whatever holds on to its output, may take.
        **given: Other arguments of `subprocess.Popen`.

    Raises:
        AssertionError: It took longer. Says what was printed, at its end the stacks of every process that still lived.
    """
    mark = secrets.token_hex(8)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environ = {**environ, _MARK: mark, "PYTHONFAULTHANDLER": "1"}
    process = subprocess.Popen(list(command), text=True, env=environ, **pipes | given)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # The youngest first: its parent, once told, would end it.
        for how in (signal.SIGABRT, signal.SIGKILL):
            for pid in sorted(_started(mark), reverse=True):
                _end(pid, how, mark)
        out, err = process.communicate(timeout=60)
        raise AssertionError(f"{command[0]} did not end within {timeout_s} s:\n{out or ''}\n{err or ''}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _end(pid: int, how: signal.Signals, mark: str) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, how)
    deadline = time.monotonic() + 5
    while pid in _started(mark) and time.monotonic() < deadline:
        time.sleep(0.05)


def _started(mark: str) -> list[int]:
    """Processes with the mark in their environment, orphans included; none where the system does not tell."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
