"""Full disks for a collector: a small file system that is filled, and a limit on the size of its files."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from ddpobs import wire
from tests.support.integration.faults import RestartableCollector

FillDisk = Callable[[RestartableCollector], AbstractContextManager[int]]
"""Leaves no space for a collector that stores there, for the duration of the block.

Yields the HTTP status with which the collector refuses batches meanwhile.
"""
SmallDisk = Callable[[Path], AbstractContextManager[FillDisk]]
"""Makes the folder, and yields the function that fills its disk."""

LARGE = [wire.Event(kind="large", at_ns=1, detail={"text": os.urandom(200).hex()}) for _ in range(500)]
"""Events too large for a free page of the database file."""


@contextmanager
def full_disk(folder: Path) -> Iterator[FillDisk]:
    """Mount a small file system, which a file can fill. Skip the test where mounting fails; in CI, fail it."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        reason = f"cannot mount a file system here (it needs root): {mounted.stderr.strip()}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)

    @contextmanager
    def fill(_: RestartableCollector) -> Iterator[int]:
        filler = folder / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(65_536)):
                    pass
            except OSError:
                pass
        yield 507
        filler.unlink()

    try:
        yield fill
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def full_quota(folder: Path) -> Iterator[FillDisk]:
    """Limit the size of the collector's files. The system handles it like a quota: writes fail."""
    folder.mkdir()

    @contextmanager
    def fill(collector: RestartableCollector) -> Iterator[int]:
        pid = collector.running.process.pid
        previous = resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        yield 503
        resource.prlimit(pid, resource.RLIMIT_FSIZE, previous)

    yield fill
