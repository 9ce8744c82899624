"""Timelines of Horovod: one file, written by rank 0, with the arrival of every rank at each tensor's reduction.

Each tensor is a `pid`. `NEGOTIATE_ALLREDUCE` lasts from its readiness on rank 0 until all ranks have launched it, with
a mark for each rank; `ALLREDUCE` is the reduction, and its end has dtype and shape
(https://horovod.readthedocs.io/en/stable/timeline_include.html). All times are on the clock of rank 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from ddpobs.errors import TraceFileError
from ddpobs.imports.rank_trace import Collective, RankTrace
from ddpobs.imports.reductions import trace_of
from ddpobs.imports.trace_events import TraceEvents

_BEGIN_BYTES = 65_536
_MARKS = (b"start_time_since_epoch_in_micros", b'"NEGOTIATE_')
_NEGOTIATE = "NEGOTIATE_"
_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}


class _Args(msgspec.Struct, frozen=True):
    name: str = ""
    micros: str | int = 0
    dtype: str = ""
    shape: str = ""


class _Event(msgspec.Struct, frozen=True):
    name: str = ""
    ph: str = ""
    pid: int = 0
    ts: Annotated[float, msgspec.Meta(ge=-4e15, le=4e15)] = 0
    args: _Args = _Args()

    @property
    def at_ns(self) -> int:
        return round(self.ts * 1000)


_EVENTS: msgspec.json.Decoder[list[_Event]] = msgspec.json.Decoder(list[_Event])


class _Reduction(NamedTuple):
    """A tensor's reduction: when each rank launched it, when it began and ended."""

    tensor: str
    order: int
    launched_ns: dict[int, int]
    started_ns: int
    done_ns: int
    size_bytes: int
    dtype: str

    def of(self, rank: int) -> Collective:
        """Return it as this rank's collective."""
        times = self.launched_ns[rank], max(self.started_ns, self.launched_ns[rank]), self.done_ns
        return Collective("all_reduce", *times, self.size_bytes, self.dtype, self.tensor, self.order)


@dataclass
class _Tensor:
    """A tensor's lane."""

    order: int
    name: str = ""
    launched_ns: dict[int, int] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)
    started_ns: int = 0
    reductions: list[_Reduction] = field(default_factory=list)

    def add(self, event: _Event) -> None:
        """Add an event of this lane."""
        if event.ph == "B":
            if not self.open and event.name.startswith(_NEGOTIATE):
                self.launched_ns = {}
            elif not self.open:
                self.started_ns = event.at_ns
            self.open.append(event.name)
        elif event.ph == "X" and self.open and self.open[-1].startswith(_NEGOTIATE) and event.name.isdecimal():
            self.launched_ns[int(event.name[:7])] = event.at_ns
        elif event.ph == "E" and self.open and self.open.pop() == "ALLREDUCE" and not self.open and self.launched_ns:
            size_bytes = _elements(event.args.shape) * _BYTES.get(event.args.dtype, 0)
            launched_ns = {rank: min(at_ns, event.at_ns) for rank, at_ns in self.launched_ns.items()}
            times = launched_ns, min(self.started_ns, event.at_ns), event.at_ns
            self.reductions.append(_Reduction(self.name, self.order, *times, size_bytes, event.args.dtype))


def _elements(shape: str) -> int:
    sizes = [int(part.strip()[:13]) for part in shape.strip("[]() ").split(",")[:16] if part.strip().isdecimal()]
    return min(math.prod(sizes), 2**40)


def is_timeline(path: Path) -> bool:
    """Whether a file looks like a timeline."""
    with path.open("rb") as file:
        begin = file.read(_BEGIN_BYTES)
    return any(mark in begin for mark in _MARKS)


def read(path: Path, advance: Callable[[int], object] = lambda _: None) -> list[RankTrace]:
    """Read the traces of all ranks. A tensor's n-th reduction belongs to the n-th step.

    Raises:
        TraceFileError: The file is no timeline, is cut off, or has no reduction of two ranks.
    """
    tensors: dict[int, _Tensor] = {}
    wall_ns = 0
    for piece in TraceEvents(path, _EVENTS, advance).pieces():
        for event in piece:
            if event.name == "start_time_since_epoch_in_micros" and str(event.args.micros).isdecimal():
                wall_ns = min(int(str(event.args.micros)[:16]), 2**52) * 1000
            elif event.name == "process_name":
                tensors.setdefault(event.pid, _Tensor(len(tensors))).name = event.args.name
            elif event.ph in "BXE" and event.ph:
                tensors.setdefault(event.pid, _Tensor(len(tensors))).add(event)
    reduced = [tensor for tensor in tensors.values() if tensor.reductions]
    ranks = sorted({rank for tensor in reduced for one in tensor.reductions for rank in one.launched_ns})
    if len(ranks) < 2:
        raise TraceFileError(path, "reductions of two ranks or more", f"{len(ranks)}")
    steps = _whole_steps(reduced, ranks)
    return [
        trace_of(
            path.name,
            rank,
            ranks[-1] + 1,
            [[one.of(rank) for one in step] for step in steps],
            backend="horovod",
            wall_ns=wall_ns,
        )
        for rank in ranks
    ]


def _whole_steps(tensors: list[_Tensor], ranks: list[int]) -> list[list[_Reduction]]:
    """The reductions of each step in which all ranks took part: one that has joined launches nothing.

    Most tensors are gradients, and are reduced once a step. A tensor that is reduced more often is none.
    """
    counts = Counter(len(tensor.reductions) for tensor in tensors)
    steps_taken = max(counts, key=lambda reductions: (counts[reductions], reductions))
    steps: list[list[_Reduction]] = [[] for _ in range(steps_taken)]
    for tensor in (tensor for tensor in tensors if len(tensor.reductions) <= steps_taken):
        for step, one in zip(steps, tensor.reductions, strict=False):
            step.append(one)
    return [step for step in steps if all(len(one.launched_ns) == len(ranks) for one in step)]
