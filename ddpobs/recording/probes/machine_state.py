"""State of the host, at each pulse, from the proc file system; read on the telemetry thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import get_ident
from typing import Any

import msgspec

from ddpobs.recording.probes.busy_threads import BusyThreads
from ddpobs.recording.probes.cpu_quota import CpuQuota
from ddpobs.shared.processors import format_processors
from ddpobs.wire import UNKNOWN, Machine

_IDLE, _IO_WAIT, _STEAL = 3, 4, 7
"""Positions in the first line of /proc/stat (proc_stat(5))."""
_MAX_NAME = 256
_TIMES = 8
"""Times of that line that add up to the whole; guests' are part of others."""


class MachineState:
    """Reads the state of the host; shares are since the previous look.

    Args:
        quota: The control group's processor quota.
        device: Returns further fields of `wire.Machine`, those of the device.
        training_thread: Returns the identifier of the training thread.
        proc: The proc file system.
    """

    def __init__(
        self,
        quota: CpuQuota,
        device: Callable[[], dict[str, Any]] = dict,
        training_thread: Callable[[], int] = get_ident,
        proc: Path = Path("/proc"),
    ) -> None:
        self._quota, self._device, self._training_thread, self._proc = quota, device, training_thread, proc
        self._threads = BusyThreads(proc)
        self._processors: list[int] = []
        """Ticks of all processors by use, at the previous look."""
        self._process: tuple[int, int] | None = None
        """Time of the previous look, and the process's processor time then."""

    def look(self) -> Machine:
        """Read the state. A figure that cannot be read is `UNKNOWN`; never raises."""
        fields: dict[str, Any] = {"quota_permille": self._quota.permille, "throttled_ns": self._quota.throttled_ns()}
        for read in (
            self._loads,
            self._allowed,
            self._busy_threads,
            self._shares,
            self._process_share,
            self._memory,
            self._resident,
            self._device,
        ):
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
            "host_processors": os.cpu_count() or UNKNOWN,
            "load_milli": round(1000 * os.getloadavg()[0]),
        }

    def _allowed(self) -> dict[str, str]:
        """Return the processors of the training thread; a library may set those of one thread alone."""
        number = _native_id(self._training_thread())
        if number is None or not hasattr(os, "sched_getaffinity"):
            return {}
        return {"allowed": format_processors(os.sched_getaffinity(number))[:_MAX_NAME]}

    def _busy_threads(self) -> dict[str, dict[str, int]]:
        return {"threads": self._threads.look(self._training_thread())}

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


def _native_id(ident: int) -> int | None:
    """Return the kernel's number of a thread; the main thread of a forked process may have its parent's number."""
    if ident == threading.main_thread().ident:
        return os.getpid()
    return next((thread.native_id for thread in threading.enumerate() if thread.ident == ident), None)
