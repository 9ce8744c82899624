"""What a device's clock tells, with events that stand for the device's; `tests/gpu` asks a real one."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpobs import clocks
from ddpobs.clocks import CudaClock

MS = 1_000_000


class Device:
    """Its clock gains a thousandth on the host's, which the test moves."""

    def __init__(self) -> None:
        self.host_ns = 5_000 * MS
        self.captures = self.failed = self.hangs = False
        self.asked = 0

    def at_ms(self) -> float:
        return self.host_ns * 1.001 / MS

    def ask(self) -> None:
        assert not self.captures, "the capture of a graph fails where anybody asks for an event"
        self.asked += 1

    def event(self, **_: object) -> Any:
        return Event(self)

    def sleep(self, seconds: float) -> None:
        self.host_ns += round(seconds * 1e9)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at_ms, self.there = device, 0.0, True

    def record(self, _: object) -> None:
        if self.device.failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.at_ms, self.there = self.device.at_ms(), not self.device.hangs

    def query(self) -> bool:
        self.device.ask()
        self.device.host_ns += 10_000 * (not self.there)
        return self.there

    def elapsed_time(self, later: Event) -> float:
        self.device.ask()
        return later.at_ms - self.at_ms


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _, priority: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(clocks, "time", SimpleNamespace(monotonic_ns=lambda: device.host_ns, sleep=device.sleep))
    return device


def test_a_device_s_clock_that_drifts_is_held_to_the_host_s(device: Device) -> None:
    clock = CudaClock(torch.device("cuda"))
    for _ in range(1000):
        stamp = clock.now()
        at_ns = device.host_ns
        device.host_ns += 100 * MS
        assert abs(clock.nanoseconds(stamp) - at_ns) < 5 * MS  # Of four seconds between two looks, a thousandth.


def test_a_device_that_hangs_does_not_hold_up_who_reads_what_came_before(device: Device) -> None:
    clock = CudaClock(torch.device("cuda"))
    stamp, at_ns = clock.now(), device.host_ns
    device.host_ns += 5_000 * MS
    device.hangs = True
    assert clock.nanoseconds(stamp) == at_ns
    assert device.host_ns < at_ns + 5_100 * MS, "it waited for the device"


def test_a_device_that_failed_gives_no_stamp_and_training_no_error_of_telemetry_s(device: Device) -> None:
    clock = CudaClock(torch.device("cuda"))
    device.failed = True
    assert clock.now() == 0
    assert list(clock.times([clock.now()])) == [0]


@pytest.mark.parametrize("ask", ["times", "took"])
def test_nothing_is_asked_of_a_device_while_a_graph_is_captured(device: Device, ask: str) -> None:
    clock = CudaClock(torch.device("cuda"))
    stamp = clock.now()
    work = SimpleNamespace(_get_duration=lambda: device.ask() or 0.5)
    began, asked = threading.Event(), device.asked
    clocks.time.sleep = lambda _: began.set()  # type: ignore[assignment]
    clock.set_capturing(True)
    device.captures = True
    assert not clock.is_ready(stamp)
    assert clock.now() == 0
    told: list[Any] = []
    asks = {"times": lambda: told.append(clock.times([stamp, 0])), "took": lambda: told.append(clock.duration_ns(work))}
    thread = threading.Thread(target=asks[ask])
    thread.start()
    assert began.wait(30)
    assert (told, device.asked) == ([], asked)
    device.captures = False
    clock.set_capturing(False)
    thread.join(30)
    assert told == {"times": [[5_000 * MS, 0]], "took": [500_000]}[ask]
