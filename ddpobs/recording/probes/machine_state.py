"""State of the host, at each pulse, from the proc file system; read on the telemetry thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from ddpobs.recording.probes.cpu_quota import CpuQuota
from ddpobs.wire import UNKNOWN, Machine

_IDLE, _IO_WAIT, _STEAL = 3, 4, 7
"""Positions in the first line of /proc/stat (proc_stat(5))."""
_TIMES = 8
"""Times of that line that add up to the whole; guests' are part of others."""


class MachineState:
    """Reads the state of the host; shares are since the previous look.

    Args:
        quota: The control group's processor quota.
        device: Returns further fields of `wire.Machine`, those of the device.
        proc: The proc file system.
    """

    def __init__(
        self, quota: CpuQuota, device: Callable[[], dict[str, Any]] = dict, proc: Path = Path("/proc")
    ) -> None:
        self._quota, self._device, self._proc = quota, device, proc
        self._processors: list[int] = []
        """Ticks of all processors by use, at the previous look."""
        self._process: tuple[int, int] | None = None
        """Time of the previous look, and the process's processor time then."""

    def look(self) -> Machine:
        """Read the state. A figure that cannot be read is `UNKNOWN`; never raises."""
        fields: dict[str, Any] = {"quota_permille": self._quota.permille, "throttled_ns": self._quota.throttled_ns()}
        for read in (self._loads, self._shares, self._process_share, self._memory, self._resident, self._device):
            with suppress(Exception):
                fields |= read()
        try:
            return msgspec.convert(fields, Machine)
        except msgspec.ValidationError:  # A driver may report anything.
            return Machine()

    @staticmethod
    def _loads() -> dict[str, int]:
        return {
            "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            "load_milli": round(1000 * os.getloadavg()[0]),
        }

    def _shares(self) -> dict[str, int]:
        with (self._proc / "stat").open() as file:
            ticks = [int(field) for field in file.readline().split()[1 : 1 + _TIMES]]
        earlier_ticks, self._processors = self._processors, ticks
        if len(earlier_ticks) != len(ticks):
            return {}
        increases = [max(0, now - then) for now, then in zip(ticks, earlier_ticks, strict=True)]
        whole = max(1, sum(increases))
        idle = increases[_IDLE] + increases[_IO_WAIT]
        return {
            "busy_permille": 1000 * (whole - idle) // whole,
            "steal_permille": 1000 * increases[_STEAL] // whole,
        }

    def _process_share(self) -> dict[str, int]:
        now = time.monotonic_ns(), time.process_time_ns()
        earlier, self._process = self._process, now
        if earlier is None or now[0] <= earlier[0]:
            return {}
        return {"process_permille": 1000 * (now[1] - earlier[1]) // (now[0] - earlier[0])}

    def _memory(self) -> dict[str, int]:
        kilobytes = {}
        with (self._proc / "meminfo").open() as file:
            for line in file:
                name, _, value = line.partition(":")
                if name in ("MemTotal", "MemAvailable"):
                    kilobytes[name] = int(value.split()[0])
                if len(kilobytes) == 2:
                    break
        total, available = kilobytes.get("MemTotal"), kilobytes.get("MemAvailable")
        return {
            "memory_bytes": UNKNOWN if total is None else 1024 * total,
            "available_bytes": UNKNOWN if available is None else 1024 * available,
        }

    def _resident(self) -> dict[str, int]:
        pages = int((self._proc / "self" / "statm").read_text().split()[1])
        return {"resident_bytes": pages * os.sysconf("SC_PAGE_SIZE")}
