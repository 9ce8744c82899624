"""Exchanges of several collectives, where the second needs the first one's result.

Started from the first one's completion they would come in another order on another rank, and then they hang or mix up
buckets. One thread runs them instead, bucket after bucket, over a process group that nobody else uses: in the order of
launch, which is every rank's, also where several modules share the two.

On CUDA that thread has a stream of its own: whatever waits for a collective on the backward's would hold up the rest of
the backward, under which the collectives are to travel.
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

from ddpobs.comm.side_groups import group_beside

_Job = tuple[Callable[[], None], Any, "Future[Any]"]
_Jobs = SimpleQueue[_Job | None]

_jobs: weakref.WeakKeyDictionary[dist.ProcessGroup, _Jobs] = weakref.WeakKeyDictionary()
"""What waits for the thread of each process group that stages run over."""


class Stages:
    """Runs the later stages of exchanges in the order in which they were handed in.

    Args:
        group: Over whose ranks. The first exchange over it makes a group beside it, for the collectives of all such
            stages: not before, as a module may be copied on one rank alone.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._over = group
        self._own: dict[torch.device, tuple[dist.ProcessGroup, _Jobs]] = {}

    def run(self, stages: Callable[[dist.ProcessGroup], None], device: torch.device) -> StagedPending:
        """Have `stages` called with the group, without gradients; on CUDA on a stream that follows the current one."""
        if device not in self._own:
            made = group_beside(self._over, device, 0)
            self._own[device] = made, _jobs_of(made, device)
        group, jobs = self._own[device]
        begun = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        future: Future[Any] = Future()
        jobs.put((partial(stages, group), begun, future))
        return StagedPending(stages, device, future)


class StagedPending:
    """Pending until its last stage has run.

    It keeps the stages: what they hold was made on the stream of who waits, and is not to be used for anything else
    there before.
    """

    __slots__ = ("_device", "_future", "_stages")

    def __init__(self, stages: object, device: torch.device, future: Future[Any]) -> None:
        self._stages, self._device, self._future = stages, device, future

    def wait(self) -> None:
        """As `Pending.wait`; an error in any stage comes out here."""
        ended = self._future.result()
        if ended is not None:
            torch.cuda.current_stream(self._device).wait_event(ended)

    def on_done(self, told: Callable[[object], None]) -> None:
        """As `Pending.on_done`."""
        self._future.add_done_callback(told)


def _jobs_of(group: dist.ProcessGroup, device: torch.device) -> _Jobs:
    jobs = _jobs.get(group)
    if jobs is None:
        jobs = _jobs[group] = SimpleQueue()
        threading.Thread(target=_work, args=(jobs, device), name="ddpobs-comm", daemon=True).start()
        weakref.finalize(group, jobs.put, None)
    return jobs


def _work(jobs: _Jobs, device: torch.device) -> None:
    stream = None
    while (job := jobs.get()) is not None:
        stages, begun, future = job
        try:
            if begun is not None:
                stream = stream or _stream_of_its_own(device)
                stream.wait_event(begun)
            with torch.no_grad():
                stages()
            ended = stream.record_event() if stream is not None else None
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(ended)
        del job, stages, future


def _stream_of_its_own(device: torch.device) -> Any:
    """The current one of this thread from now on, whose device is the first one until it is told."""
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    torch.cuda.set_stream(stream)
    return stream
