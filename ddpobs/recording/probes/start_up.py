"""Times of the process's start."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from ddpobs.clocks import IMPORTED_NS
from ddpobs.steps.account import StartUp, StartUpWaits

_TORCH_DDP = "torch.nn.parallel.distributed"


def start_up(is_first: bool) -> StartUp:
    """Return the times of this process's start; `ready_ns` is now.

    Args:
        is_first: The process had no telemetry before; else its start belongs to the earlier one.
    """
    now_ns = time.monotonic_ns()
    if not is_first:
        return StartUp(now_ns, now_ns, now_ns)
    # Under `ddpobs run` this module is imported with the first model: torch's import is then the end of the imports.
    loaded_ns = getattr(sys.modules.get(_TORCH_DDP), "__ddpobs_loaded_ns__", IMPORTED_NS)
    started_ns = process_started_ns()
    return StartUp(started_ns, min(now_ns, max(loaded_ns, started_ns or loaded_ns)), now_ns)


def waits_before(is_first: bool, texts: bool) -> StartUpWaits:
    """Return the waits at barriers before the first model, which `ddpobs run` notes; none in other processes.

    Args:
        is_first: The process had no telemetry before.
        texts: Keep the lines of code.
    """
    waits = StartUpWaits()
    if is_first:
        for took_ns, place in getattr(sys.modules.get(_TORCH_DDP), "__ddpobs_waits__", ()):
            waits.add(took_ns, place if texts else "")
    return waits


def process_started_ns() -> int | None:
    """Start of this process on its monotonic clock, to 10 ms; None where /proc does not have it."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        # The 22nd field counts clock ticks since the boot (proc_pid_stat(5)); the second one may contain spaces.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 10**9 // os.sysconf("SC_CLK_TCK")
        if age_ns >= 0:
            return time.monotonic_ns() - age_ns
    return None
