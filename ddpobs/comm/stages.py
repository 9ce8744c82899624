"""Exchanges of several collectives, where the second needs the first one's result.

Started from the first one's completion they would come in another order on another rank, and then they hang or mix up
buckets. One thread runs them instead, bucket after bucket, over a process group that nobody else uses: in the order of
launch, which is every rank's, also where several modules share the two.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from ddpobs.comm.beside import group_beside

_Job = tuple[Callable[[], None], Any, "Future[None]"]
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

    def run(self, stages: Callable[[dist.ProcessGroup], None], device: torch.device) -> Staged:
        """Have `stages` called with the group, without gradients and on the current stream of a CUDA device."""
        if device not in self._own:
            made = group_beside(self._over, device, 0)
            self._own[device] = made, _jobs_of(made)
        group, jobs = self._own[device]
        stream = torch.cuda.stream(torch.cuda.current_stream(device)) if device.type == "cuda" else nullcontext()
        future: Future[None] = Future()
        jobs.put((partial(stages, group), stream, future))
        return Staged(future)


class Staged:
    """Pending until its last stage has run."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """As `Pending.wait`; an error in any stage comes out here."""
        self._future.result()

    def on_done(self, told: Callable[[object], None]) -> None:
        """As `Pending.on_done`."""
        self._future.add_done_callback(told)


def _jobs_of(group: dist.ProcessGroup) -> _Jobs:
    jobs = _jobs.get(group)
    if jobs is None:
        jobs = _jobs[group] = SimpleQueue()
        threading.Thread(target=_work, args=(jobs,), name="ddpobs-comm", daemon=True).start()
        weakref.finalize(group, jobs.put, None)
    return jobs


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        stages, stream, future = job
        try:
            with stream, torch.no_grad():
                stages()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        del job, stages, future
