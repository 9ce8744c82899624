"""What tests leave behind: processes that they started, and file systems that they mounted.

Every process that starts from here has a mark in its environment, which its own children inherit.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MARK = "TESTS_STARTED_BY"
"""Of the environment; a mark begins with that of the process above."""
_END_S, _KILL_S = 10.0, 100.0


def new_mark() -> str:
    """A mark for processes to start from here; those of the processes above hold for them, too."""
    return f"{os.environ.get(MARK, '')}/{secrets.token_hex(8)}"


def started(mark: str) -> list[int]:
    """List the living processes with the mark, orphans included; empty on systems without /proc."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            for entry in (folder / "environ").read_bytes().split(b"\0"):
                name, _, value = entry.partition(b"=")
                if name == MARK.encode() and f"{value.decode()}/".startswith(f"{mark}/"):
                    pids.append(int(folder.name))
    return pids


def kill(mark: str) -> None:
    """End all processes with the mark."""
    deadline = time.monotonic() + _KILL_S
    while (pids := started(mark)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def remove(mark: str, folders: Iterable[Path]) -> list[str]:
    """End marked processes and unmount file systems in the folders; returns a line for each."""
    deadline = time.monotonic() + _END_S
    while started(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    lines = [f"process {pid} ({_command(pid)})" for pid in started(mark)]
    kill(mark)
    for mount in _mounts(tuple(f"{folder}" for folder in folders)):
        subprocess.run(["umount", "--lazy", mount], check=False)
        lines.append(f"file system {mount}")
    return lines


def _command(pid: int) -> str:
    """Its command, and the test that started it; a forked process has the test of the process that forked it."""
    with suppress(OSError):
        folder = Path(f"/proc/{pid}")
        command = folder.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200].strip()
        entries = folder.joinpath("environ").read_bytes().split(b"\0")
        tests = [entry.partition(b"=")[2].decode() for entry in entries if entry.startswith(b"PYTEST_CURRENT_TEST=")]
        return ", of ".join([command, *tests])
    return "ended since"


def _mounts(beginnings: tuple[str, ...]) -> list[str]:
    table = Path("/proc/self/mountinfo")
    points = [line.split()[4] for line in table.read_text().splitlines()] if table.exists() else []
    return [point for point in points if point.startswith(beginnings)]
