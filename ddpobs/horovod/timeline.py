"""Horovod's timeline: a Chrome trace of every tensor's collectives, written by rank 0.

A tensor's negotiation lasts from its readiness on rank 0 until every rank has launched it, with a mark for each rank.
Then the collective begins. Here ranks launch without a negotiation. They report their launch times afterwards, through
the rendezvous store and in the wall clocks of their hosts. A timeline has the collectives in which rank 0 takes part.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ddpobs.comm import FuturePending
from ddpobs.horovod.position import check_initialized, rank

_WAIT_S = 2.0
_MAX_WAITING = 100
"""Reductions that rank 0 keeps in memory while they run, or the other ranks' launch times are missing."""

_current: Timeline | None = None
_started = 0


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start to write a timeline. Every rank must call this; only rank 0 writes the file.

    A timeline of this path that is being written goes on. One of another path ends.

    Args:
        file_path: A JSON file, for chrome://tracing or Perfetto.
        mark_cycles: Whether to mark the begin of each synchronisation of gradients, and of each other collective.

    Raises:
        HorovodError: `init` was not called.
    """
    global _current, _started  # noqa: PLW0603 - one timeline a process
    check_initialized()
    if _current is not None:
        if _current.path == Path(file_path):
            _current.mark_cycles = mark_cycles
            return
        stop_timeline()
    _started += 1
    _current = Timeline(Path(file_path), mark_cycles, _started)


def stop_timeline() -> None:
    """Finish the file; does nothing without a timeline."""
    global _current
    timeline, _current = _current, None
    if timeline is not None:
        timeline.close()


def current() -> Timeline | None:
    """Return the timeline that is being written, or None."""
    return _current


class Reduction:
    """Stamps of one synchronisation of an optimizer's gradients, or of one other collective.

    They are in ns of the wall clock; 0 for a missing stamp.

    Args:
        names: The parameters' names, or the collective's; None for none.
        gradients: The parameters, for dtype and shape.
        buckets: The parameters' indices by bucket, in launch order.
        backend: The process group's, such as `gloo`.
        ranks: The ranks that take part.
        operation: What is done, in Horovod's words.
    """

    def __init__(
        self,
        names: Sequence[str | None],
        gradients: Sequence[torch.Tensor],
        buckets: Sequence[list[int]],
        backend: str,
        ranks: Sequence[int],
        operation: str = "allreduce",
    ) -> None:
        self.names, self.gradients, self.buckets, self.ranks = names, gradients, buckets, ranks
        self.operation = operation.upper()
        self.activity = f"{backend.upper()}_{self.operation}"
        self.began = time.time_ns()
        self.ready = [0] * len(names)
        self.launched = [0] * len(buckets)
        self.done = [0] * len(buckets)

    @property
    def has_ended(self) -> bool:
        """Whether every bucket that was launched is done."""
        return all(done or not launched for launched, done in zip(self.launched, self.done, strict=True))


class Timeline:
    """The file of one timeline.

    Args:
        path: The file.
        mark_cycles: Whether synchronisations are marked.
        number: Distinguishes it from the process's earlier timelines.

    Attributes:
        path: As given.
        mark_cycles: As given; may be changed.
    """

    def __init__(self, path: Path, mark_cycles: bool, number: int) -> None:
        self.path, self.mark_cycles = path, mark_cycles
        self._store = PrefixStore(f"ddpobs/timeline/{number}", dist.distributed_c10d._get_default_store())
        self._rank = rank()
        self._counts: Counter[str] = Counter()
        self._waiting: list[tuple[str, Reduction]] = []
        self._lanes: dict[str, int] = {}
        self._free_ns: dict[str, int] = {}
        """By lane of collectives without a name, the end of its last."""
        self._out: TextIO | None = None
        self._epoch = time.time_ns()
        if self._rank == 0:
            self._out = path.open("w")
            self._out.write("[\n")
            self._write("M", "process_name", 0, self._epoch, args={"name": ""})
            self._write(
                "i", "start_time_since_epoch_in_micros", 0, self._epoch, args={"micros": str(self._epoch // 1000)}
            )

    def add(self, reduction: Reduction, stream: str) -> None:
        """Add a reduction that was launched; to be called on every rank that takes part.

        Args:
            reduction: The reduction.
            stream: Names the reductions that these ranks add in the same order.
        """
        key = f"{stream}/{self._counts[stream]}"
        self._counts[stream] += 1
        if self._rank:
            if 0 in reduction.ranks:
                self._store.set(f"{key}/{self._rank}", json.dumps(reduction.launched))
            return
        self._waiting.append((key, reduction))
        while self._waiting and (len(self._waiting) > _MAX_WAITING or self._is_complete(*self._waiting[0])):
            self._flush()

    def follow(
        self,
        work: Any,
        stream: str,
        ranks: Sequence[int],
        backend: str,
        operation: str,
        tensor: torch.Tensor,
        name: str | None,
    ) -> None:
        """Add a collective that was just launched; `work` is torch's, the rest is as in `add` and `Reduction`."""
        like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")  # The tensor itself may go.
        reduction = Reduction([name], [like], [[0]], backend, ranks, operation)
        reduction.launched[0] = reduction.began

        def done(_: object) -> None:
            reduction.done[0] = time.time_ns()

        if self._rank == 0:
            FuturePending(work.get_future()).on_done(done)
        self.add(reduction, stream)

    def close(self) -> None:
        """Write the remaining synchronisations and end the file."""
        deadline = time.monotonic() + _WAIT_S
        while self._waiting:
            while not self._is_complete(*self._waiting[0]) and time.monotonic() < deadline:
                time.sleep(0.01)
            self._flush()
        if self._out is not None:
            self._out.write("{}]\n")
            self._out.close()

    def _is_complete(self, key: str, reduction: Reduction) -> bool:
        keys = [f"{key}/{other}" for other in reduction.ranks if other]
        return reduction.has_ended and (not keys or bool(self._store.check(keys)))

    def _flush(self) -> None:
        reduction_key, reduction = self._waiting.pop(0)
        launches = {0: reduction.launched}
        for other in reduction.ranks:
            key = f"{reduction_key}/{other}"
            if other and self._store.check([key]):
                launches[other] = json.loads(self._store.get(key))
                self._store.delete_key(key)
        if self.mark_cycles:
            self._write("i", "CYCLE_START", 0, reduction.began, s="g")
        for bucket, members in enumerate(reduction.buckets):
            launched, done = reduction.launched[bucket], reduction.done[bucket]
            if not launched or not done:
                continue  # This rank had joined, or the bucket's end was not recorded.
            starts_ns = {other: ns[bucket] for other, ns in launches.items() if bucket < len(ns) and ns[bucket]}
            for member in members:
                self._write_tensor(reduction, member, starts_ns, launched, max(done, launched))

    def _write_tensor(
        self, reduction: Reduction, member: int, starts_ns: dict[int, int], launched: int, done: int
    ) -> None:
        ready = min(reduction.ready[member] or launched, launched)
        name = reduction.names[member] or self._free_name(reduction.operation.lower(), ready, done)
        lane, gradient = self._lane(name), reduction.gradients[member]
        all_started = min(max(starts_ns.values()), done)
        self._write("B", f"NEGOTIATE_{reduction.operation}", lane, ready)
        for other, start_ns in sorted(starts_ns.items(), key=lambda start: start[1]):
            self._write("X", str(other), lane, min(max(start_ns, ready), all_started), dur=0)
        self._write("E", None, lane, all_started)
        self._write("B", reduction.operation, lane, all_started)
        self._write("B", reduction.activity, lane, all_started)
        self._write("E", None, lane, done)
        description = {"dtype": str(gradient.dtype).removeprefix("torch."), "shape": str(list(gradient.shape))}
        self._write("E", None, lane, done, args=description)

    def _free_name(self, operation: str, ready: int, done: int) -> str:
        """The first lane that no other collective without a name occupies."""
        names = (f"{operation}.noname.{number}" for number in count(1))
        name = next(name for name in names if self._free_ns.get(name, 0) <= ready)
        self._free_ns[name] = done
        return name

    def _lane(self, name: str) -> int:
        if name not in self._lanes:
            self._lanes[name] = len(self._lanes) + 1
            lane = self._lanes[name]
            self._write("M", "process_name", lane, self._epoch, args={"name": name})
            self._write("M", "process_sort_index", lane, self._epoch, args={"sort_index": lane})
        return self._lanes[name]

    def _write(self, kind: str, name: str | None, lane: int, time_ns: int, **fields: Any) -> None:
        assert self._out is not None
        event = {"ph": kind, "ts": (time_ns - self._epoch) // 1000, "pid": lane, **fields}
        if name is not None:
            event["name"] = name
        self._out.write(json.dumps(event) + ",\n")
