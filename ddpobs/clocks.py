"""Stamps of when something happened: host time, or CUDA events that are read later.

A *stamp* is what `now()` returns: an int in nanoseconds on the host, a recorded event on CUDA. Only the telemetry
thread turns stamps into times, so that training never waits for a device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ddpobs.wire import Anchor

Stamp = Any


class Clock(Protocol):
    """What the recorder asks of a clock."""

    def now(self) -> Stamp:
        """A stamp for this moment, or for the moment when the current stream gets here."""
        ...

    def passed(self, stamp: Stamp) -> bool:
        """Whether the stamp can be read without waiting."""
        ...

    def times(self, stamps: Sequence[Stamp]) -> Sequence[int]:
        """Nanoseconds on this process's monotonic clock; 0 where a stamp was not taken.

        May wait for the device where `passed` is False.
        """
        ...

    def capturing(self, begins: bool) -> None:
        """A CUDA graph's capture begins or has ended: in between nothing may be asked of the device."""
        ...


class HostClock:
    """Stamps are `time.monotonic_ns()` itself."""

    def __init__(self) -> None:
        self.now: Callable[[], int] = time.monotonic_ns

    def passed(self, stamp: int) -> bool:
        """Whether the stamp was taken; a list of stamps starts out as zeros."""
        return stamp > 0

    def times(self, stamps: Sequence[int]) -> Sequence[int]:
        """The stamps themselves."""
        return stamps

    def capturing(self, begins: bool) -> None:
        """Host time does not mind."""


class CudaClock:
    """Stamps are events on the current stream; a collective's done-callback runs on a stream that follows it.

    While a CUDA graph is captured stamps are 0: an event inside it has no time, and one that another thread so much as
    asks for makes the capture fail (cudaStreamCaptureModeGlobal).

    Elapsed time of events is a float in milliseconds (torch.cuda.Event.elapsed_time), whose rounding grows with the
    distance from the reference, so the reference is taken anew every few seconds.
    """

    _RENEW_NS = 4_000_000_000
    _POLL_S = 0.0005

    def __init__(self, device: Any) -> None:
        """Tie the device's time to the host's once, at construction.

        Args:
            device: A CUDA `torch.device`.
        """
        import torch

        self._cuda: Any = torch.cuda
        self._device = device
        self._taken_ns = 0
        self._reference: Any = None
        self._asking = threading.Lock()
        self._captures = False
        self._renew()

    def now(self) -> Stamp:
        """An event recorded on the device's current stream; 0 while a graph is captured."""
        if self._captures:
            return 0
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def passed(self, stamp: Stamp) -> bool:
        """Whether the device has got to the event."""
        with self._asking:
            return stamp != 0 and not self._captures and bool(stamp.query())

    def times(self, stamps: Sequence[Stamp]) -> Sequence[int]:
        """Host times at which the device got to the events."""
        return [self.nanoseconds(stamp) if stamp else 0 for stamp in stamps]

    def nanoseconds(self, stamp: Stamp) -> int:
        """Host time at which the device got to the event."""
        while not self.passed(stamp):
            time.sleep(self._POLL_S)
        with self._asking:
            at_ns: int = self._taken_ns + round(self._reference.elapsed_time(stamp) * 1e6)
        if at_ns - self._taken_ns > self._RENEW_NS:
            # Go on from a passed event, without touching the streams that training uses.
            self._reference, self._taken_ns = stamp, at_ns
        return at_ns

    def capturing(self, begins: bool) -> None:
        """Ask nothing of the device from now on, or again; waits for a question under way, which takes microseconds."""
        with self._asking:
            self._captures = begins

    def _renew(self) -> None:
        """Read both clocks together, before training starts: the only synchronisation."""
        with self._cuda.device(self._device):
            self._reference = self._cuda.Event(enable_timing=True)
            self._reference.record()
            self._reference.synchronize()
        self._taken_ns = time.monotonic_ns()


def clock_for(device_type: str, device: Any = None) -> Clock:
    """The clock that tells the truth for modules on that kind of device."""
    return CudaClock(device) if device_type == "cuda" else HostClock()


def anchor() -> Anchor:
    """Wall and monotonic clock, read together."""
    return Anchor(wall_ns=time.time_ns(), monotonic_ns=time.monotonic_ns())
