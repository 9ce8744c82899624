"""Stamps of when something happened: host time, or CUDA events that are read later.

A *stamp* is what `now()` returns: an int in nanoseconds on the host, a recorded event on CUDA. Only the telemetry
thread turns stamps into times, so that training never waits for a device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ddpobs.wire import UNKNOWN, Anchor

Stamp = Any


class Clock(Protocol):
    """What the recorder asks of a clock."""

    def now(self) -> Stamp:
        """A stamp for this moment, or for the moment when the current stream gets here; 0 if none can be taken.

        Raises nothing: training calls it as it is.
        """
        ...

    def is_ready(self, stamp: Stamp) -> bool:
        """Whether the stamp can be read without waiting."""
        ...

    def times(self, stamps: Sequence[Stamp]) -> Sequence[int]:
        """Nanoseconds on this process's monotonic clock; 0 where a stamp was not taken.

        May wait for the device where `passed` is False.
        """
        ...

    def duration_ns(self, work: Any) -> int:
        """How long a collective that is over was moving; `wire.UNKNOWN` where its work does not tell."""
        ...

    def set_capturing(self, begins: bool) -> None:
        """A CUDA graph's capture begins or has ended: in between nothing may be asked of the device."""
        ...


class HostClock:
    """Stamps are `time.monotonic_ns()` itself."""

    def __init__(self) -> None:
        self.now: Callable[[], int] = time.monotonic_ns

    def is_ready(self, stamp: int) -> bool:
        """Whether the stamp was taken; a list of stamps starts out as zeros."""
        return stamp > 0

    def times(self, stamps: Sequence[int]) -> Sequence[int]:
        """The stamps themselves."""
        return stamps

    def duration_ns(self, work: Any) -> int:
        """As the work itself tells, which gloo's does not."""
        return _took_ns(work)

    def set_capturing(self, begins: bool) -> None:
        """Host time does not mind."""


class CudaClock:
    """Stamps are events on the current stream; a collective's done-callback runs on a stream that follows it.

    While a CUDA graph is captured stamps are 0: an event inside it has no time, and one that another thread so much as
    asks for makes the capture fail (cudaStreamCaptureModeGlobal).

    Elapsed time of events is a float in milliseconds (torch.cuda.Event.elapsed_time), whose rounding grows with the
    distance from the reference, and the device's clock and the host's drift apart: so the reference is taken anew every
    few seconds, on a stream on which nothing is waited for. That is one of high priority: of the others torch has 32,
    dealt in turn to whoever asks, a collective's every done-callback among them, whose stream waits for the collective.
    One that hangs must not hold up the telemetry thread, which tells of it: then the older reference serves on.
    """

    _RENEW_NS = 4_000_000_000
    _POLL_S = 0.0005
    _TRIES = 3
    _QUICK_NS = 200_000
    _MOST_NS = 10_000_000

    def __init__(self, device: Any) -> None:
        """Tie the device's time to the host's.

        Args:
            device: A CUDA `torch.device`.
        """
        import torch

        self._cuda: Any = torch.cuda
        self._device = device
        self._taken_ns = self._tried_ns = 0
        self._reference: Any = None
        self._stream: Any = torch.cuda.Stream(device, priority=-1)
        self._asking = threading.Lock()
        self._captures = False
        self._renew()

    def now(self) -> Stamp:
        """An event recorded on the device's current stream; 0 while a graph is captured, or once the device failed."""
        if self._captures:
            return 0
        try:
            event = self._cuda.Event(enable_timing=True)
            event.record(self._cuda.current_stream(self._device))
        except RuntimeError:  # Training hears of it from its own calls.
            return 0
        return event

    def is_ready(self, stamp: Stamp) -> bool:
        """Whether the device has got to the event."""
        with self._asking:
            return self._through(stamp)

    def times(self, stamps: Sequence[Stamp]) -> Sequence[int]:
        """Host times at which the device got to the events."""
        return [self.nanoseconds(stamp) if stamp else 0 for stamp in stamps]

    def nanoseconds(self, stamp: Stamp) -> int:
        """Host time at which the device got to the event."""
        while True:
            with self._asking:  # Elapsed time asks the device, too: a capture begins before all of this, or after.
                if self._through(stamp):
                    if time.monotonic_ns() - self._tried_ns > self._RENEW_NS:
                        self._renew()
                    after_ns: int = round(self._reference.elapsed_time(stamp) * 1e6)
                    return self._taken_ns + after_ns
            time.sleep(self._POLL_S)

    def duration_ns(self, work: Any) -> int:
        """As NCCL's work tells, whose events the device has passed."""
        while True:
            with self._asking:
                if not self._captures:
                    return _took_ns(work)
            time.sleep(self._POLL_S)

    def set_capturing(self, begins: bool) -> None:
        """Ask nothing of the device from now on, or again; waits for a question under way, which takes microseconds."""
        with self._asking:
            self._captures = begins

    def _through(self, stamp: Stamp) -> bool:
        """`passed`, for whoever holds the lock."""
        return stamp != 0 and not self._captures and bool(stamp.query())

    def _renew(self) -> None:
        """Read both clocks together: the quickest of a few tries, for a host may be held up in between."""
        quickest_ns = None
        for _ in range(self._TRIES):
            reference = self._cuda.Event(enable_timing=True)
            began_ns = self._tried_ns = time.monotonic_ns()
            reference.record(self._stream)
            while not reference.query():
                waited_ns = time.monotonic_ns() - began_ns
                if waited_ns > self._MOST_NS and self._reference is not None:
                    return
                if waited_ns > self._QUICK_NS:
                    time.sleep(self._POLL_S)
            ended_ns = time.monotonic_ns()
            if quickest_ns is None or ended_ns - began_ns < quickest_ns:
                quickest_ns = ended_ns - began_ns
                self._reference, self._taken_ns = reference, (began_ns + ended_ns) // 2


def _took_ns(work: Any) -> int:
    try:
        took_ns: int = round(work._get_duration() * 1e6)
    except (RuntimeError, AttributeError):
        return UNKNOWN
    return took_ns


def clock_for(device_type: str, device: Any = None) -> Clock:
    """The clock that tells the truth for modules on that kind of device."""
    return CudaClock(device) if device_type == "cuda" else HostClock()


def anchor() -> Anchor:
    """Wall and monotonic clock, read together."""
    return Anchor(wall_ns=time.time_ns(), monotonic_ns=time.monotonic_ns())
