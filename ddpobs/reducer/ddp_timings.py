"""Torch's own coarse times of some iterations, kept also where telemetry is off."""

from __future__ import annotations

import time


class Timings:
    """Host times of the iterations that `_get_ddp_logging_data` samples: the first ten, then one in `every`.

    Coarse beside the telemetry: communication is one interval from the first launch to the last completion. The marks:
    the forward was called, the first gradient came, the first bucket is launched, the last gradient came, all was
    waited for.

    Attributes:
        iteration: Synchronised iterations begun so far.
        told: How many had been at the last sample.
        ready_after_ns: By parameter, when its gradient came after the first one, in the last sample.
    """

    _FIRST = 10
    _MARKS = ("forward_began", "backward_began", "comm_began", "backward_ended", "comm_ended")

    def __init__(self) -> None:
        self.every = 100
        self.iteration = self.told = 0
        self.ready_after_ns: dict[int, int] = {}
        self._samples = 0
        self._open: dict[str, int] | None = None
        self._last: dict[str, int] = {}
        self._sums: dict[str, int] = {}

    def forward_began(self) -> None:
        """A synchronised iteration's forward was called."""
        if self._is_sampled(self.iteration):
            self.told = self.iteration
        self.iteration += 1
        self._open = None
        if self._is_sampled(self.iteration):
            self._open, self.ready_after_ns = {}, {}
        self.mark(self._MARKS[0])

    def _is_sampled(self, iteration: int) -> bool:
        return iteration <= self._FIRST or iteration % self.every == 0

    def mark(self, what: str) -> None:
        """One of the marks is reached; what counts is the first time."""
        if self._open is not None:
            self._open.setdefault(what, time.time_ns())

    @property
    def sampling(self) -> bool:
        """Whether the iteration under way is a sample."""
        return self._open is not None

    def ready(self, index: int) -> None:
        """A parameter's gradient came; another forward may have been called since the backward began."""
        if self._open is not None and (began := self._open.get("backward_began")) is not None:
            self.ready_after_ns[index] = time.time_ns() - began

    def comm_ended(self) -> None:
        """The last bucket was waited for."""
        self.mark(self._MARKS[-1])
        stamps, self._open = self._open, None
        if stamps is None or len(stamps) < len(self._MARKS):
            return
        forward, began, launched, ready, done = (stamps[mark] for mark in self._MARKS)
        # Buckets that are only launched once all gradients are there overlap with nothing.
        times = {
            "forward_compute_time": began - forward,
            "backward_compute_time": ready - began,
            "backward_comm_time": done - launched,
            "backward_compute_comm_overlap_time": max(0, ready - launched),
        }
        self._samples += 1
        for name, took in times.items():
            self._sums[f"avg_{name}"] = self._sums.get(f"avg_{name}", 0) + took
        self._last = times | {
            "forward_compute_time_start": forward,
            "backward_compute_time_start": began,
            "backward_compute_time_end": ready,
            "backward_comm_time_start": launched,
            "backward_comm_time_end": done,
        }

    def facts(self) -> dict[str, int]:
        """The last sampled iteration's times, and means over all sampled ones, in ns."""
        return self._last | {name: total // self._samples for name, total in self._sums.items()}
