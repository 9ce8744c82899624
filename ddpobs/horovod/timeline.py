"""Horovod's timeline: a Chrome trace of every tensor's way, written by rank 0.

A tensor is negotiated from when it is ready on rank 0 until every rank has started its bucket, with a mark for each;
then it is reduced. Ranks start without asking each other here, and tell of their starts afterwards, through the
rendezvous store and by their hosts' wall clocks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ddpobs.errors import HorovodError
from ddpobs.horovod.process import rank, size

_WAIT_S = 2.0
_LAG = 2
"""Synchronisations for which rank 0 lets the other ranks' marks be late."""

_current: Timeline | None = None
_started = 0


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write a timeline from now on. Called on every rank; only rank 0 writes the file.

    Args:
        file_path: A JSON file, for chrome://tracing or Perfetto.
        mark_cycles: Also mark where each synchronisation of gradients begins.

    Raises:
        HorovodError: One is being written, or `init` was not called.
    """
    global _current, _started  # noqa: PLW0603 - one timeline a process
    if _current is not None:
        raise HorovodError("a timeline is being written: call stop_timeline() first")
    _started += 1
    _current = Timeline(Path(file_path), mark_cycles, _started)


def stop_timeline() -> None:
    """Finish the file; without a timeline nothing happens."""
    global _current
    timeline, _current = _current, None
    if timeline is not None:
        timeline.close()


def current() -> Timeline | None:
    """The timeline that is being written."""
    return _current


class Reduction:
    """What one synchronisation of an optimizer's gradients leaves: stamps in ns of the wall clock, 0 where none came.

    Args:
        names: The parameters'.
        gradients: The parameters, for dtype and shape.
        buckets: The parameters' numbers by bucket, in launch order.
        activity: What the reduction itself is called.
    """

    def __init__(
        self, names: Sequence[str], gradients: Sequence[torch.Tensor], buckets: Sequence[list[int]], activity: str
    ) -> None:
        self.names, self.gradients, self.buckets, self.activity = names, gradients, buckets, activity
        self.began = time.time_ns()
        self.ready = [0] * len(names)
        self.launched = [0] * len(buckets)
        self.done = [0] * len(buckets)


class Timeline:
    """One timeline.

    Args:
        path: The file.
        mark_cycles: Whether synchronisations are marked.
        number: Tells it from the process's earlier ones.
    """

    def __init__(self, path: Path, mark_cycles: bool, number: int) -> None:
        self._mark_cycles = mark_cycles
        self._store = PrefixStore(f"ddpobs/timeline/{number}", dist.distributed_c10d._get_default_store())
        self._rank, self._ranks = rank(), size()
        self._count = 0
        self._waiting: list[tuple[int, Reduction]] = []
        self._lanes: dict[str, int] = {}
        self._out: TextIO | None = None
        self._epoch = time.time_ns()
        if self._rank == 0:
            self._out = path.open("w")
            self._out.write("[\n")
            self._write("M", "process_name", 0, self._epoch, args={"name": ""})
            self._write(
                "i", "start_time_since_epoch_in_micros", 0, self._epoch, args={"micros": str(self._epoch // 1000)}
            )

    def add(self, reduction: Reduction) -> None:
        """One more synchronisation is over, on every rank."""
        number, self._count = self._count, self._count + 1
        if self._rank:
            self._store.set(f"{number}/{self._rank}", json.dumps(reduction.launched))
            return
        self._waiting.append((number, reduction))
        while self._waiting and (len(self._waiting) > _LAG or self._told(self._waiting[0][0])):
            self._flush()

    def close(self) -> None:
        """Write what is left and end the file."""
        deadline = time.monotonic() + _WAIT_S
        while self._waiting:
            while not self._told(self._waiting[0][0]) and time.monotonic() < deadline:
                time.sleep(0.01)
            self._flush()
        if self._out is not None:
            self._out.write("{}]\n")
            self._out.close()

    def _told(self, number: int) -> bool:
        keys = [f"{number}/{other}" for other in range(1, self._ranks)]
        return not keys or bool(self._store.check(keys))

    def _flush(self) -> None:
        number, reduction = self._waiting.pop(0)
        arrivals = {0: reduction.launched}
        for other in range(1, self._ranks):
            key = f"{number}/{other}"
            if self._store.check([key]):
                arrivals[other] = json.loads(self._store.get(key))
                self._store.delete_key(key)
        if self._mark_cycles:
            self._write("i", "CYCLE_START", 0, reduction.began, s="g")
        for bucket, members in enumerate(reduction.buckets):
            launched, done = reduction.launched[bucket], reduction.done[bucket]
            if not launched or not done:
                continue  # This rank had joined, or its end was not seen.
            here = {which: at[bucket] for which, at in arrivals.items() if bucket < len(at) and at[bucket]}
            for member in members:
                self._write_tensor(reduction, member, here, launched, max(done, launched))

    def _write_tensor(self, reduction: Reduction, member: int, here: dict[int, int], launched: int, done: int) -> None:
        lane, gradient = self._lane(reduction.names[member]), reduction.gradients[member]
        ready = min(reduction.ready[member] or launched, launched)
        everyone = min(max(here.values()), done)
        self._write("B", "NEGOTIATE_ALLREDUCE", lane, ready)
        for which, at in sorted(here.items(), key=lambda arrival: arrival[1]):
            self._write("X", str(which), lane, min(max(at, ready), everyone), dur=0)
        self._write("E", None, lane, everyone)
        self._write("B", "ALLREDUCE", lane, everyone)
        self._write("B", reduction.activity, lane, everyone)
        self._write("E", None, lane, done)
        described = {"dtype": str(gradient.dtype).removeprefix("torch."), "shape": str(list(gradient.shape))}
        self._write("E", None, lane, done, args=described)

    def _lane(self, name: str) -> int:
        if name not in self._lanes:
            self._lanes[name] = len(self._lanes) + 1
            lane = self._lanes[name]
            self._write("M", "process_name", lane, self._epoch, args={"name": name})
            self._write("M", "process_sort_index", lane, self._epoch, args={"sort_index": lane})
        return self._lanes[name]

    def _write(self, kind: str, name: str | None, lane: int, at_ns: int, **more: Any) -> None:
        assert self._out is not None
        event = {"ph": kind, "ts": (at_ns - self._epoch) // 1000, "pid": lane, **more}
        if name is not None:
            event["name"] = name
        self._out.write(json.dumps(event) + ",\n")
