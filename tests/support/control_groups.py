"""Control groups with a processor quota, of either version, where this machine lets tests make them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_FIRST, _SECOND = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
_PERIOD_US = 20_000


class QuotaGroup:
    """A control group; processes join it by their id."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def join(self, pid: int | None = None) -> None:
        """Move a process, by default this one, with all its threads."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid() if pid is None else pid))


@contextmanager
def quota_group(permille: int) -> Iterator[QuotaGroup]:
    """Make a group whose processes get that many thousandths of a processor; skips the test if that is forbidden."""
    parent = _FIRST if _FIRST.is_dir() else _SECOND
    folder = parent / f"ddpobs-test-{os.getpid()}-{time.monotonic_ns()}"
    quota_us = permille * _PERIOD_US // 1000
    try:
        folder.mkdir()
        if parent == _FIRST:
            (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (folder / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
    except OSError as error:
        with suppress(OSError):
            folder.rmdir()
        pytest.skip(f"NO REAL QUOTA WAS TESTED: this machine lets no test make a control group ({error})")
    try:
        yield QuotaGroup(folder)
    finally:
        with suppress(OSError):
            for pid in (folder / "cgroup.procs").read_text().split():
                (parent / "cgroup.procs").write_text(pid)
        with suppress(OSError):
            folder.rmdir()
