"""CudaClock with simulated events; `tests/gpu` uses a real device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpobs import clocks
from ddpobs.clocks import CudaClock

MS = 1_000_000


class Device:
    """A simulated device. Its clock gains a thousandth on the host's clock, which the test advances."""

    def __init__(self) -> None:
        self.host_ns = 5_000 * MS
        self.captures = self.failed = self.hangs = False
        self.queries = 0

    def at_ms(self) -> float:
        return self.host_ns * 1.001 / MS

    def count_query(self) -> None:
        assert not self.captures, "a query of an event makes the capture of a graph fail"
        self.queries += 1

    def event(self, **_: object) -> Any:
        return Event(self)

    def sleep(self, seconds: float) -> None:
        self.host_ns += round(seconds * 1e9)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at_ms, self.is_reached = device, 0.0, True

    def record(self, _: object) -> None:
        if self.device.failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.at_ms, self.is_reached = self.device.at_ms(), not self.device.hangs

    def query(self) -> bool:
        self.device.count_query()
        self.device.host_ns += 10_000 * (not self.is_reached)
        return self.is_reached

    def elapsed_time(self, later: Event) -> float:
        self.device.count_query()
        return later.at_ms - self.at_ms


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _, priority: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(clocks, "time", SimpleNamespace(monotonic_ns=lambda: device.host_ns, sleep=device.sleep))
    return device


def test_a_drifting_device_clock_follows_the_hosts_clock(device: Device) -> None:
    clock = CudaClock(torch.device("cuda"))
    for _ in range(1000):
        stamp = clock.now()
        at_ns = device.host_ns
        device.host_ns += 100 * MS
        assert abs(clock.nanoseconds(stamp) - at_ns) < 5 * MS  # A thousandth of the four seconds between references.


def test_a_hanging_device_does_not_delay_earlier_stamps(device: Device) -> None:
    clock = CudaClock(torch.device("cuda"))
    stamp, at_ns = clock.now(), device.host_ns
    device.host_ns += 5_000 * MS
    device.hangs = True
    assert clock.nanoseconds(stamp) == at_ns
    assert device.host_ns < at_ns + 5_100 * MS, "it waited for the device"


def test_a_failed_device_gives_no_stamp_and_raises_nothing_in_training(device: Device) -> None:
    clock = CudaClock(torch.device("cuda"))
    device.failed = True
    assert clock.now() == 0
    assert list(clock.times([clock.now()])) == [0]


@pytest.mark.parametrize("call", ["times", "duration_ns"])
def test_a_device_is_not_queried_during_a_capture(device: Device, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = CudaClock(torch.device("cuda"))
    stamp = clock.now()

    def duration_ms() -> float:
        device.count_query()
        return 0.5

    work = SimpleNamespace(_get_duration=duration_ms)
    began, queries = threading.Event(), device.queries
    monkeypatch.setattr("ddpobs.clocks.time.sleep", lambda _: began.set())
    clock.set_capturing(True)
    device.captures = True
    assert not clock.is_ready(stamp)
    assert clock.now() == 0
    results: list[Any] = []
    calls: dict[str, Callable[[], Any]] = {
        "times": lambda: clock.times([stamp, 0]),
        "duration_ns": lambda: clock.duration_ns(work),
    }
    thread = threading.Thread(target=lambda: results.append(calls[call]()))
    thread.start()
    assert began.wait(30)
    assert (results, device.queries) == ([], queries)
    device.captures = False
    clock.set_capturing(False)
    thread.join(30)
    assert results == {"times": [[5_000 * MS, 0]], "duration_ns": [500_000]}[call]
