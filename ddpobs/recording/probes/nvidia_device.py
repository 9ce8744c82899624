"""State of an NVIDIA device, through the management library NVML and its package nvidia-ml-py.

The library may block for minutes when a device fails, so a thread of its own reads it. The latest reading is sent until
it is too old.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

_log = logging.getLogger("ddpobs")
_FRESH_PERIODS = 3
"""Periods after which a reading is too old to be sent."""
SLOWDOWNS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}
"""Reasons of a lowered clock by their bits (nvml.h, nvmlClocksEventReasons)."""


class NvidiaDevice:
    """Reads the state of a device from NVML, on its own thread.

    Args:
        uuid: The device's identifier, such as `GPU-5a4b...`.
        period_s: Seconds between two readings.
        nvml: The module `pynvml`.
    """

    def __init__(self, uuid: str, period_s: float, nvml: Any) -> None:
        self._uuid, self._period_s, self._nvml = uuid, period_s, nvml
        self._latest: dict[str, Any] = {}
        self._latest_s = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpobs-device", daemon=True)
        self._thread.start()

    def state(self) -> dict[str, Any]:
        """Fields of `wire.Machine` from the latest reading; empty if that is too old."""
        is_fresh = time.monotonic() - self._latest_s < _FRESH_PERIODS * self._period_s
        return self._latest if is_fresh else {}

    def stop(self) -> None:
        """End the thread after its current reading; does not wait for it."""
        self._stopped.set()

    def _run(self) -> None:
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            handle = nvml.nvmlDeviceGetHandleByUUID(self._uuid)
        except Exception as error:
            _log.info("ddpobs: NVML reports nothing of device %s: %s", self._uuid, error)
            return
        while not self._stopped.is_set():
            self._latest, self._latest_s = read_device(nvml, handle), time.monotonic()
            self._stopped.wait(self._period_s)
        with suppress(Exception):
            nvml.nvmlShutdown()


def watch_device(device: torch.device, period_s: float) -> NvidiaDevice | None:
    """Watch a CUDA device; None for other devices, without the package nvidia-ml-py, and on any error."""
    try:
        if device.type != "cuda" or find_spec("pynvml") is None:
            return None
        uuid = torch.cuda.get_device_properties(device).uuid
        return NvidiaDevice(f"GPU-{uuid}", period_s, import_module("pynvml"))
    except Exception:
        _log.info("ddpobs: the device's state is not recorded", exc_info=True)
        return None


def read_device(nvml: Any, handle: Any) -> dict[str, Any]:
    """Read fields of `wire.Machine`, without those that the device does not report."""
    sm = nvml.NVML_CLOCK_SM
    readers: tuple[Callable[[], dict[str, Any]], ...] = (
        lambda: {"device_busy_permille": 10 * int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)},
        lambda: {"device_clock_mhz": int(nvml.nvmlDeviceGetClockInfo(handle, sm))},
        lambda: {"device_most_clock_mhz": int(nvml.nvmlDeviceGetMaxClockInfo(handle, sm))},
        lambda: _memory(nvml.nvmlDeviceGetMemoryInfo(handle)),
        lambda: _slowdowns(int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))),
    )
    fields: dict[str, Any] = {}
    for read in readers:
        with suppress(Exception):  # NVMLError_NotSupported on some devices.
            fields |= read()
    return fields


def _memory(memory: Any) -> dict[str, int]:
    return {"device_memory_bytes": int(memory.total), "device_used_bytes": int(memory.used)}


def _slowdowns(reasons: int) -> dict[str, list[str]]:
    return {"device_slowdowns": [name for bit, name in SLOWDOWNS.items() if reasons & bit]}
