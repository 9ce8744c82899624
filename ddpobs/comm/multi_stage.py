"""Exchanges of several collectives, where the second needs the first one's result.

If the second collective started from the first one's completion, its order among the buckets would differ between
ranks. The exchanges would then hang or mix up buckets. Here one thread runs them, bucket after bucket, over a side
group that has no other user. Their order is the order of launch, which is the same on every rank. Several modules may
share the thread and the side group.

On CUDA the thread has its own stream. To wait for a collective on the backward's stream would delay the rest of the
backward, which is to hide the collectives.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from ddpobs.comm.side_groups import get_side_group

_Job = tuple[Callable[[], None], Any, "Future[Any]"]
_Jobs = SimpleQueue[_Job | None]

_jobs: weakref.WeakKeyDictionary[dist.ProcessGroup, _Jobs] = weakref.WeakKeyDictionary()
"""The queue of each side group's thread."""


class Stages:
    """Runs the later stages of exchanges in the order of their submission.

    Args:
        group: The process group of the exchanges. The first exchange creates a side group for the collectives of the
            later stages. The constructor does not, because a module may be copied on one rank alone.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._queues: dict[torch.device, tuple[dist.ProcessGroup, _Jobs]] = {}

    def run(self, stages: Callable[[dist.ProcessGroup], None], device: torch.device) -> StagedPending:
        """Submit `stages`, which is called with the side group and without gradients.

        On CUDA it runs on a stream that waits for the work of the current stream up to now.
        """
        if device not in self._queues:
            side_group = get_side_group(self._group, device, 0)
            self._queues[device] = side_group, _jobs_of(side_group, device)
        side_group, jobs = self._queues[device]
        submission = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        future: Future[Any] = Future()
        jobs.put((partial(stages, side_group), submission, future))
        return StagedPending(stages, device, future)


class StagedPending:
    """Pending until its last stage has run.

    Holds a reference to the stages. Their tensors were allocated on the waiting stream, which must not reuse the memory
    before the stages end.
    """

    __slots__ = ("_device", "_future", "_stages")

    def __init__(self, stages: object, device: torch.device, future: Future[Any]) -> None:
        self._stages, self._device, self._future = stages, device, future

    def wait(self) -> None:
        """As `Pending.wait`; raises the error of a stage that failed."""
        completion = self._future.result()
        if completion is not None:
            torch.cuda.current_stream(self._device).wait_event(completion)

    def on_done(self, callback: Callable[[object], None]) -> None:
        """As `Pending.on_done`."""
        self._future.add_done_callback(callback)


def _jobs_of(side_group: dist.ProcessGroup, device: torch.device) -> _Jobs:
    jobs = _jobs.get(side_group)
    if jobs is None:
        jobs = _jobs[side_group] = SimpleQueue()
        threading.Thread(target=_run_jobs, args=(jobs, device), name="ddpobs-comm", daemon=True).start()
        weakref.finalize(side_group, jobs.put, None)
    return jobs


def _run_jobs(jobs: _Jobs, device: torch.device) -> None:
    stream = None
    while (job := jobs.get()) is not None:
        stages, submission, future = job
        try:
            if submission is not None:
                stream = stream or _create_stream(device)
                stream.wait_event(submission)
            with torch.no_grad():
                stages()
            completion = stream.record_event() if stream is not None else None
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(completion)
        del job, stages, future


def _create_stream(device: torch.device) -> Any:
    """Create a stream and make it this thread's current one; a new thread's current device is the first."""
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    torch.cuda.set_stream(stream)
    return stream
