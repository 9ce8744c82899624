"""State of the host and the device at a pulse.

This machine has no NVIDIA device, so its library is a fake with the functions of nvidia-ml-py.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.rig import patience
from ddpobs import wire
from ddpobs.recording.probes.cpu_quota import CpuQuota
from ddpobs.recording.probes.machine_state import MachineState
from ddpobs.recording.probes.nvidia_device import NvidiaDevice, read_device, watch_device
from ddpobs.shared.processors import format_processors, parse_processors


@pytest.mark.skipif(sys.platform != "linux", reason="the proc file system is Linux's")
def test_the_state_of_this_machine_is_plausible() -> None:
    state = MachineState(CpuQuota())
    state.look()
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        pass
    machine = state.look()
    assert machine.processors == len(os.sched_getaffinity(0))
    assert 50 <= machine.process_permille <= 1000 * (os.cpu_count() or 1)
    assert 0 <= machine.busy_permille <= 1000
    assert 0 <= machine.steal_permille <= 1000
    assert machine.load_milli >= 0
    assert 0 < machine.resident_bytes < machine.memory_bytes
    assert 0 < machine.available_bytes <= machine.memory_bytes
    assert machine.device_clock_mhz == wire.UNKNOWN


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has affinity by thread")
def test_the_allowed_processors_are_those_of_the_training_thread_alone() -> None:
    ready, done, lowest = threading.Event(), threading.Event(), min(os.sched_getaffinity(0))

    def train() -> None:
        os.sched_setaffinity(0, {lowest})
        ready.set()
        done.wait()

    thread = threading.Thread(target=train)
    thread.start()
    ready.wait()
    try:
        state = MachineState(CpuQuota(), training_thread=lambda: thread.ident or 0)
        assert state.look().allowed == str(lowest)
    finally:
        done.set()
        thread.join()
    assert parse_processors(MachineState(CpuQuota()).look().allowed) == os.sched_getaffinity(0)
    assert state.look().allowed == ""


@pytest.mark.skipif(sys.platform != "linux", reason="the proc file system is Linux's")
def test_threads_beside_the_training_thread_are_named_with_their_processor_time() -> None:
    ended = threading.Event()

    def save() -> None:
        while not ended.is_set():
            sum(range(1000))

    state = MachineState(CpuQuota())
    threads = [threading.Thread(target=save, name="saver"), threading.Thread(target=ended.wait, name="idle")]
    for thread in threads:
        thread.start()
    try:
        state.look()
        named = patience.until(lambda: state.look().threads)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert named.keys() == {"saver"}
    assert 50 <= named["saver"] <= 1000


@pytest.mark.parametrize(("numbers", "text"), [({3}, "3"), ({0, 1, 2, 8, 10, 11}, "0-2,8,10-11"), (set(), "")])
def test_processors_are_written_as_ranges_and_read_again(numbers: set[int], text: str) -> None:
    assert format_processors(numbers) == text
    assert parse_processors(text) == numbers


@pytest.mark.parametrize("text", ["a", "3-", "1,,2", "-1", None, 7])
def test_any_other_text_has_no_processors(text: object) -> None:
    assert parse_processors(text) == frozenset()


def test_shares_are_of_the_time_since_the_previous_look(tmp_path: Path) -> None:
    state = MachineState(CpuQuota(tmp_path), proc=tmp_path)
    (tmp_path / "stat").write_text("cpu  100 0 0 100 0 0 0 0 0 0\n")
    assert state.look().busy_permille == wire.UNKNOWN
    (tmp_path / "stat").write_text("cpu  130 0 0 150 10 0 0 10 0 0\n")
    machine = state.look()
    assert (machine.busy_permille, machine.steal_permille) == (400, 100)
    assert machine.memory_bytes == wire.UNKNOWN


def test_nothing_is_raised_without_a_proc_file_system_or_with_a_failing_device(tmp_path: Path) -> None:
    def fails() -> dict[str, Any]:
        raise RuntimeError("the device is lost")

    machine = MachineState(CpuQuota(tmp_path), fails, proc=tmp_path).look()
    assert (machine.busy_permille, machine.throttled_ns) == (wire.UNKNOWN, wire.UNKNOWN)
    odd = MachineState(CpuQuota(tmp_path), lambda: {"device_clock_mhz": "fast"}, proc=tmp_path).look()
    assert (odd.device_clock_mhz, odd.load_milli) == (wire.UNKNOWN, wire.UNKNOWN)


class FakeNvml:
    """The functions of nvidia-ml-py that are used, for a device of this test."""

    NVML_CLOCK_SM = 1

    def __init__(self, reasons: int = 0x40 | 0x1) -> None:
        self.reasons = reasons
        self.asked: list[str] = []

    def nvmlInit(self) -> None:  # noqa: N802
        self.asked.append("init")

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.asked.append("shutdown")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return f"handle of {uuid}"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        self.asked.append(handle)
        return SimpleNamespace(gpu=87)

    def nvmlDeviceGetClockInfo(self, _handle: str, _kind: int) -> int:  # noqa: N802
        return 1200

    def nvmlDeviceGetMaxClockInfo(self, _handle: str, _kind: int) -> int:  # noqa: N802
        return 1980

    def nvmlDeviceGetMemoryInfo(self, _handle: str) -> Any:  # noqa: N802
        raise RuntimeError("NVML_ERROR_NOT_SUPPORTED")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _handle: str) -> int:  # noqa: N802
        return self.reasons


def test_a_device_reports_its_use_its_clock_and_the_reasons_for_a_lower_one() -> None:
    assert read_device(FakeNvml(), "h") == {
        "device_busy_permille": 870,
        "device_clock_mhz": 1200,
        "device_most_clock_mhz": 1980,
        "device_slowdowns": ["hw_thermal"],
    }


def test_the_library_is_asked_on_a_thread_of_its_own_and_old_answers_are_dropped() -> None:
    nvml = FakeNvml()
    device = NvidiaDevice("GPU-1", 0.05, nvml)
    deadline = time.monotonic() + 10
    while not device.state() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert device.state()["device_busy_permille"] == 870
    assert "handle of GPU-1" in nvml.asked
    device.stop()
    device._thread.join(10)
    assert nvml.asked[-1] == "shutdown"
    device._latest_s -= 1
    assert device.state() == {}


def test_other_devices_and_an_absent_package_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watch_device(torch.device("cpu"), 1) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr("ddpobs.recording.probes.nvidia_device.find_spec", lambda _: None)
    assert watch_device(torch.device("cuda"), 1) is None
