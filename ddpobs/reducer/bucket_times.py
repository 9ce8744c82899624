"""Stamps of a backward's buckets, taken for the recorder."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ddpobs.clocks import Stamp
from ddpobs.comm import Pending
from ddpobs.config import wants_ranges
from ddpobs.observers import BackwardStamps, ModuleObserver
from ddpobs.torch_seam.collectives import time_collectives
from ddpobs.torch_seam.interpreter_exit import stay_in_interpreter


class BucketTimes:
    """The stamps of one reducer.

    Args:
        recorder: Receives the times of each bucket; None with telemetry off.

    Attributes:
        record: Of the backward under way; None if it is not recorded.
        now: Takes a stamp.
        marks_nvtx: Launches are marked as NVTX ranges.
    """

    def __init__(self, recorder: ModuleObserver | None) -> None:
        self._recorder = recorder
        self.record: BackwardStamps | None = None
        self.now: Callable[[], Stamp] = recorder.now if recorder is not None else int
        self.marks_nvtx = wants_ranges(os.environ) and torch.cuda.is_available()
        self._works_time_themselves = False

    def use_group(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Time the collectives of this group, on that device."""
        self._works_time_themselves = self._recorder is not None and time_collectives(group, device)

    def backward_began(self, flat_index: Sequence[int]) -> list[Callable[[int], None]]:
        """Open the backward's record.

        Args:
            flat_index: By parameter, its place in the record.

        Returns:
            What to call with the index of each parameter whose gradient arrives.
        """
        self.record = self._recorder.backward() if self._recorder is not None else None
        stamps, now = self.record.parameter_ready_ns if self.record is not None else None, self.now
        if stamps is None:
            return []

        def stamp(index: int) -> None:
            stamps[flat_index[index]] = now()

        return [stamp]

    def follow(self, pending: Pending, index: int, *, keeps_work: bool, timed_by_wait: bool) -> None:
        """Record when a bucket's communication completes.

        Args:
            pending: The communication.
            index: Of the bucket.
            keeps_work: The buffer may be kept until the work's own time is read.
            timed_by_wait: `wait_for` follows.
        """
        record = self.record
        if record is None:
            return
        work = getattr(pending, "work", None) if self._works_time_themselves and keeps_work else None
        if work is not None:
            record.works[index] = work
        if timed_by_wait:
            return
        done_ns, now = record.done_ns, self.now

        def done(_: object) -> None:
            done_ns[index] = now()
            stay_in_interpreter()

        pending.on_done(done)

    def wait_for(self, pending: Pending) -> None:
        """Wait for the last bucket, and stamp the end of the wait as its completion."""
        if self.record is not None:
            pending.wait()
            self.record.done_ns[-1] = self.now()
