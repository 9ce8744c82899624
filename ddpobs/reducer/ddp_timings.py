"""Torch's own coarse times of some iterations, measured even if telemetry is off."""

from __future__ import annotations

import time


class Timings:
    """Host times of the iterations that `_get_ddp_logging_data` samples: the first ten, then one in `every`.

    They are coarser than telemetry: communication is one interval, from the first launch to the last completion. The
    marks of an iteration are: call of the forward, first gradient, launch of the first bucket, last gradient, end of
    the last wait.

    Attributes:
        every: Distance of the samples after the first ten iterations.
        iteration: Number of synchronised iterations begun so far.
        sampled_iteration: That number at the last sample.
        ready_after_ns: By parameter, time from the first gradient to its own, in the last sample.
    """

    _FIRST = 10
    _MARKS = ("forward_began", "backward_began", "comm_began", "backward_ended", "comm_ended")

    def __init__(self) -> None:
        self.every = 100
        self.iteration = self.sampled_iteration = 0
        self.ready_after_ns: dict[int, int] = {}
        self._samples = 0
        self._stamps: dict[str, int] | None = None
        """The marks of the iteration in progress; None if it is not sampled."""
        self._last: dict[str, int] = {}
        self._sums: dict[str, int] = {}

    def forward_began(self) -> None:
        """A synchronised iteration's forward was called."""
        if self._is_sampled(self.iteration):
            self.sampled_iteration = self.iteration
        self.iteration += 1
        self._stamps = None
        if self._is_sampled(self.iteration):
            self._stamps, self.ready_after_ns = {}, {}
        self.mark(self._MARKS[0])

    def _is_sampled(self, iteration: int) -> bool:
        return iteration <= self._FIRST or iteration % self.every == 0

    def mark(self, name: str) -> None:
        """Stamp a mark, unless it is stamped already."""
        if self._stamps is not None:
            self._stamps.setdefault(name, time.time_ns())

    @property
    def sampling(self) -> bool:
        """Whether the iteration in progress is a sample."""
        return self._stamps is not None

    def ready(self, index: int) -> None:
        """Stamp a parameter's gradient. Another forward may have been called since the backward began."""
        if self._stamps is not None and (start := self._stamps.get("backward_began")) is not None:
            self.ready_after_ns[index] = time.time_ns() - start

    def comm_ended(self) -> None:
        """The wait for the last bucket has ended."""
        self.mark(self._MARKS[-1])
        stamps, self._stamps = self._stamps, None
        if stamps is None or len(stamps) < len(self._MARKS):
            return
        forward, backward, launched, ready, done = (stamps[mark] for mark in self._MARKS)
        # Buckets that are launched after the last gradient overlap with nothing.
        times = {
            "forward_compute_time": backward - forward,
            "backward_compute_time": ready - backward,
            "backward_comm_time": done - launched,
            "backward_compute_comm_overlap_time": max(0, ready - launched),
        }
        self._samples += 1
        for name, duration_ns in times.items():
            self._sums[f"avg_{name}"] = self._sums.get(f"avg_{name}", 0) + duration_ns
        self._last = times | {
            "forward_compute_time_start": forward,
            "backward_compute_time_start": backward,
            "backward_compute_time_end": ready,
            "backward_comm_time_start": launched,
            "backward_comm_time_end": done,
        }

    def facts(self) -> dict[str, int]:
        """The times of the last sampled iteration, and means over all sampled ones, in ns."""
        return self._last | {name: total // self._samples for name, total in self._sums.items()}
