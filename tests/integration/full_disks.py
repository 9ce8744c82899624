"""Places with little room: a file system of a few megabytes, and a limit on the size of files."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from ddpobs import wire
from tests.integration.faults import Mortal

Room = Callable[[Mortal], AbstractContextManager[int]]
"""Takes a collector that stores there, and leaves no room while its block lasts, which is told the status of the
answers meanwhile."""
Full = Callable[[Path], AbstractContextManager[Room]]
"""Makes a folder, and gives its room."""

LARGE = [wire.Event(kind="large", at_ns=1, detail={"text": os.urandom(200).hex()}) for _ in range(500)]
"""Events that fit into no page that happens to be free."""


@contextmanager
def full_disk(folder: Path) -> Iterator[Room]:
    """A file system of its own, filled by a file; a skip where it cannot be mounted, and a failure in CI."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = f"no file system can be mounted here, which needs root: {done.stderr.strip()}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)

    @contextmanager
    def leave_no_room(_: Mortal) -> Iterator[int]:
        other = folder / "other"
        with other.open("wb", buffering=0) as out:
            try:
                while out.write(bytes(65_536)):
                    pass
            except OSError:
                pass
        yield 507
        other.unlink()

    try:
        yield leave_no_room
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def full_quota(folder: Path) -> Iterator[Room]:
    """A limit on the collector's files, which the system answers as it answers a quota: writing fails."""
    folder.mkdir()

    @contextmanager
    def leave_no_room(collector: Mortal) -> Iterator[int]:
        pid = collector.running.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        yield 503
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)

    yield leave_no_room
