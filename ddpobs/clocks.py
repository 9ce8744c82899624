"""Stamps: host times, or CUDA events that are read later.

A *stamp* is the result of `now()`: an int in nanoseconds on the host, a recorded event on CUDA. Only the telemetry
thread converts stamps to times, so that training never waits for a device.

The device's clock drifts from the host's, so both are read together every four seconds, on a stream that no collective
holds up. A device that fails loses its own steps only. A forked child keeps its parent's events: dropping one there
would end the process. NCCL's works report their duration, so `started = done - duration`. While a CUDA graph is
captured, nothing is recorded and no event is queried: the event `cuda_graph_captured` reports it. Replays run no
Python, so their steps have no buckets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ddpobs.wire import UNKNOWN, Anchor

Stamp = Any
IMPORTED_NS = time.monotonic_ns()
"""Time at which this module was imported, with torch and the reducer that the script uses; on the monotonic clock."""


class Clock(Protocol):
    """Interface of a clock."""

    def now(self) -> Stamp:
        """Return a stamp of this moment, or of the moment at which the current stream reaches this point.

        Returns 0 if no stamp can be taken. Never raises, because training calls it without a guard.
        """
        ...

    def is_ready(self, stamp: Stamp) -> bool:
        """Whether the stamp can be read without waiting."""
        ...

    def times(self, stamps: Sequence[Stamp]) -> Sequence[int]:
        """Convert stamps to nanoseconds of this process's monotonic clock; a missing stamp (0) stays 0.

        May wait for the device if `is_ready` is False.
        """
        ...

    def duration_ns(self, work: Any) -> int:
        """Return the duration of a completed collective's transfer; `wire.UNKNOWN` if its work does not report it."""
        ...

    def set_capturing(self, begins: bool) -> None:
        """Mark the begin or the end of a CUDA graph's capture, during which the device must not be queried."""
        ...


class HostClock:
    """Clock with `time.monotonic_ns()` itself as stamps."""

    def __init__(self) -> None:
        self.now: Callable[[], int] = time.monotonic_ns

    def is_ready(self, stamp: int) -> bool:
        """Whether the stamp was taken; lists of stamps start as zeros."""
        return stamp > 0

    def times(self, stamps: Sequence[int]) -> Sequence[int]:
        """Return the stamps themselves."""
        return stamps

    def duration_ns(self, work: Any) -> int:
        """Return the duration that the work reports; gloo's work reports none."""
        return _took_ns(work)

    def set_capturing(self, begins: bool) -> None:
        """Ignore the capture, which does not affect host time."""


class CudaClock:
    """Clock with events on the current stream as stamps; a collective's done-callback runs on a stream behind it.

    While a CUDA graph is captured, stamps are 0. An event inside the graph has no time, and a query of any event by
    another thread makes the capture fail (cudaStreamCaptureModeGlobal).

    The elapsed time between events is a float in milliseconds (torch.cuda.Event.elapsed_time). Its rounding error grows
    with the distance from the reference event, and the clocks of device and host drift apart. So the reference is
    renewed every few seconds, on a stream of high priority, on which nothing else waits. Torch assigns its 32 other
    streams in turn, also to the done-callbacks of collectives, and such a stream waits for its collective. A collective
    that hangs must not block the telemetry thread, which reports the hang. In that case the older reference stays in
    use.
    """

    _RENEW_NS = 4_000_000_000
    _POLL_S = 0.0005
    _TRIES = 3
    _QUICK_NS = 200_000
    _MAX_NS = 10_000_000

    def __init__(self, device: Any) -> None:
        """Relate the device's time to the host's.

        Args:
            device: A CUDA `torch.device`.
        """
        import torch

        self._cuda: Any = torch.cuda
        self._device = device
        self._taken_ns = self._attempted_ns = 0
        self._reference: Any = None
        self._stream: Any = torch.cuda.Stream(device, priority=-1)
        self._query_lock = threading.Lock()
        self._captures = False
        self._renew()

    def now(self) -> Stamp:
        """Record an event on the current stream; returns 0 during a graph's capture and after a device failure."""
        if self._captures:
            return 0
        try:
            event = self._cuda.Event(enable_timing=True)
            event.record(self._cuda.current_stream(self._device))
        except RuntimeError:  # Training gets the error from its own calls.
            return 0
        return event

    def is_ready(self, stamp: Stamp) -> bool:
        """Whether the device has reached the event."""
        with self._query_lock:
            return self._is_ready_locked(stamp)

    def times(self, stamps: Sequence[Stamp]) -> Sequence[int]:
        """Return the host times at which the device reached the events."""
        return [self.nanoseconds(stamp) if stamp else 0 for stamp in stamps]

    def nanoseconds(self, stamp: Stamp) -> int:
        """Return the host time at which the device reached the event."""
        while True:
            with (
                self._query_lock
            ):  # elapsed_time queries the device too: a capture begins before this block or after it.
                if self._is_ready_locked(stamp):
                    if time.monotonic_ns() - self._attempted_ns > self._RENEW_NS:
                        self._renew()
                    after_ns: int = round(self._reference.elapsed_time(stamp) * 1e6)
                    return self._taken_ns + after_ns
            time.sleep(self._POLL_S)

    def duration_ns(self, work: Any) -> int:
        """Return the duration that NCCL's work reports once the device has passed its events."""
        while True:
            with self._query_lock:
                if not self._captures:
                    return _took_ns(work)
            time.sleep(self._POLL_S)

    def set_capturing(self, begins: bool) -> None:
        """Suspend or resume queries of the device; waits for a running query, which takes microseconds."""
        with self._query_lock:
            self._captures = begins

    def _is_ready_locked(self, stamp: Stamp) -> bool:
        """`is_ready`, for a caller that has the lock."""
        return stamp != 0 and not self._captures and bool(stamp.query())

    def _renew(self) -> None:
        """Read both clocks together: the fastest of a few attempts, because the host may be interrupted in between."""
        quickest_ns = None
        for _ in range(self._TRIES):
            reference = self._cuda.Event(enable_timing=True)
            began_ns = self._attempted_ns = time.monotonic_ns()
            reference.record(self._stream)
            while not reference.query():
                waited_ns = time.monotonic_ns() - began_ns
                if waited_ns > self._MAX_NS and self._reference is not None:
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
    """Return the clock for modules on that type of device."""
    return CudaClock(device) if device_type == "cuda" else HostClock()


def anchor() -> Anchor:
    """Read wall and monotonic clock together."""
    return Anchor(wall_ns=time.time_ns(), monotonic_ns=time.monotonic_ns())
