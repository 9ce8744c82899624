"""The processor quota of this process's control group, of version 1 or 2.

A group's parents limit it too, so the tightest quota on the way to the root counts. The kernel's documentation:
admin-guide/cgroup-v2.rst (cpu.max), scheduler/sched-bwc.rst.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ddpobs.steps.counters import throttled_ns
from ddpobs.wire import UNKNOWN

_MAX_BYTES = 512
_MAX_GROUPS = 8
_MAX_READ_NS = 10_000
"""Longest read of the statistics that is made in each step; some kernels first add up the figures of all processors."""
_TRIES = 5


class CpuQuota:
    """Finds the quota and reads its statistics.

    Args:
        process: Folder of the process in the proc file system.

    Attributes:
        is_limited: There is a quota, or its absence is not certain.
        permille: The quota, 1,000 for one processor; `UNKNOWN` without one.
    """

    def __init__(self, process: Path = Path("/proc/self")) -> None:
        self._process = process
        self._descriptors: dict[Path, int] = {}
        """Descriptor of each group's statistics. They stay open: the training thread may be reading."""
        self._current: int | None = None
        """Descriptor of the statistics; None without a quota, below 0 if they cannot be read in each step."""
        self.permille, self.is_limited = UNKNOWN, False
        self.look()

    def look(self) -> None:
        """Find the quota, which may change while the process runs. Never raises."""
        group, self.permille = _tightest(self._process)
        if group is None:
            self._current = None if _readable(self._process) else -1
        else:
            self._current = self._open(group)
        self.is_limited = self._current is not None

    def statistics(self) -> bytes | None:
        """Read `cpu.stat`, on any thread.

        Returns:
            None without a quota; empty if it cannot be read, or only slowly.

        Raises:
            OSError: The descriptor was closed.
        """
        current = self._current
        if current is None:
            return None
        return os.pread(current, _MAX_BYTES, 0) if current >= 0 else b""

    def throttled_ns(self) -> int:
        """Time for which the quota held the group up, 0 without a quota, `UNKNOWN` if it cannot be read."""
        with suppress(OSError):
            statistics = self.statistics()
            return 0 if statistics is None else throttled_ns(statistics)
        return UNKNOWN

    def close(self) -> None:
        """Close the descriptors; no thread may read any more."""
        descriptors, self._descriptors, self._current = self._descriptors, {}, -1
        for descriptor in descriptors.values():
            close_if(descriptor, "cpu.stat")

    def _open(self, group: Path) -> int:
        if group not in self._descriptors and len(self._descriptors) < _MAX_GROUPS:
            descriptor = -1
            with suppress(OSError):
                descriptor = os.open(group / "cpu.stat", os.O_RDONLY | os.O_CLOEXEC)
                if _fastest_read_ns(descriptor) > _MAX_READ_NS:
                    os.close(descriptor)
                    descriptor = -1
            self._descriptors[group] = descriptor
        return self._descriptors.get(group, -1)


def close_if(descriptor: int, *names: str) -> None:
    """Close a descriptor if it is still that of a file of one of these names.

    A program that closes all descriptors may have opened another file under this number.
    """
    with suppress(OSError):
        if descriptor >= 0 and Path(f"/proc/self/fd/{descriptor}").readlink().name in names:
            os.close(descriptor)


def _fastest_read_ns(descriptor: int) -> int:
    took_ns = []
    for _ in range(_TRIES):
        began_ns = time.monotonic_ns()
        os.pread(descriptor, _MAX_BYTES, 0)
        took_ns.append(time.monotonic_ns() - began_ns)
    return min(took_ns)


def _readable(process: Path) -> bool:
    """Whether the process's control groups are visible at all."""
    return next(_groups(process), None) is not None


def _tightest(process: Path) -> tuple[Path | None, int]:
    """Return the group with the lowest quota, and that quota in thousandths of a processor."""
    quotas = [(permille, group) for group in _groups(process) if (permille := _quota_permille(group)) > 0]
    permille, group = min(quotas, default=(UNKNOWN, None))
    return group, permille


def _quota_permille(group: Path) -> int:
    """Return a group's own quota; `UNKNOWN` if it has none."""
    with suppress(OSError, ValueError):
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        if quota.isdigit() and int(period) > 0:
            return max(1, 1000 * int(quota) // int(period))
    return UNKNOWN


def _groups(process: Path) -> Iterator[Path]:
    """Yield the folders of the process's group and of its parents, as far as they are mounted here."""
    with suppress(OSError, ValueError):
        memberships = [line.split(":", 2) for line in (process / "cgroup").read_text().splitlines()]
        mounts = [line.split(" - ") for line in (process / "mountinfo").read_text().splitlines() if " - cgroup" in line]
        for mounting, kind in mounts:
            root, mount = mounting.split()[3:5]
            is_second, options = kind.startswith("cgroup2 "), kind.split()[-1].split(",")
            for _, controllers, path in memberships:
                if (not controllers) if is_second else ("cpu" in controllers.split(",") and "cpu" in options):
                    yield from _way_up(Path(mount), root, path)


def _way_up(mount: Path, root: str, path: str) -> Iterator[Path]:
    """Yield the group's folder and its parents up to the mount.

    Args:
        mount: Folder at which the hierarchy is mounted.
        root: Group that is mounted there; in a container often the container's own.
        path: The process's group.
    """
    inside = path.removeprefix(root) if root != "/" else path
    folder = mount / inside.lstrip("/")
    if ".." in folder.parts or not folder.is_dir():
        folder = mount
    for group in (folder, *folder.parents):
        yield group
        if group == mount:
            break
