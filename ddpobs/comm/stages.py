"""Exchanges of several collectives, where the second needs the first one's result.

Started from the first one's completion they would come in another order on another rank, and then they hang or mix up
buckets. One thread a process runs them instead, bucket after bucket, over a process group that nobody else uses.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

_made: defaultdict[str, count[int]] = defaultdict(count)
"""Groups made beside another one, by its name, numbered as they are first used: in the same order on every rank."""

_Job = tuple[Callable[[], None], Any, "Future[None]"]


class Stages:
    """Runs the later stages of exchanges in the order in which they were handed in.

    Args:
        group: Over whose ranks. At the first exchange a group of its own is made, for the collectives of those stages:
            a module may be copied on one rank alone.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._over = group
        self._group: dist.ProcessGroup | None = None
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._jobs.put, None)

    def run(self, stages: Callable[[dist.ProcessGroup], None], device: torch.device) -> Staged:
        """Have `stages` called with the group, without gradients and on the current stream of a CUDA device."""
        if self._group is None:
            self._group = another_group(self._over)
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._jobs,), name="ddpobs-comm", daemon=True)
            self._thread.start()
        stream = torch.cuda.stream(torch.cuda.current_stream(device)) if device.type == "cuda" else nullcontext()
        future: Future[None] = Future()
        self._jobs.put((partial(stages, self._group), stream, future))
        return Staged(future)

    def close(self) -> None:
        """End the thread and the group, if there are any."""
        self._jobs.put(None)
        if self._group is not None:
            dist.destroy_process_group(self._group)


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


def another_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A process group over the same ranks. Every rank of the group calls this, and no other needs to.

    `torch.distributed.new_group` either wants every rank of the world, or (with `use_local_synchronization`) names the
    group by how many groups a rank has, so that ranks with other groups besides wait for each other for ever.
    """
    c10d, ranks = dist.distributed_c10d, dist.get_process_group_ranks(group)
    made, _ = c10d._new_process_group_helper(
        len(ranks),
        group.rank(),
        ranks,
        dist.Backend(dist.get_backend(group)),
        c10d._get_default_store(),
        group_name=c10d.GroupName(f"{group.group_name}/ddpobs/{next(_made[group.group_name])}"),
        timeout=c10d._get_default_timeout(dist.get_backend(group)),
    )
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made  # type: ignore[no-any-return]


def _work(jobs: SimpleQueue[_Job | None]) -> None:
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
