"""Events of the Chrome trace format, and the tracks that they stand on.

Perfetto takes a track whose number is 0, or a process's number, as the process's own: it then shows the events of one
rank in a track of another. Tracks are therefore numbered above any rank. Times are in microseconds.

Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import numpy.typing as npt

from ddpobs import wire

ALL_RANKS = 2**21
"""Process of the counters, above any rank."""
STEPS_TRACK, PHASES_TRACK = ALL_RANKS + 1, ALL_RANKS + 2
FIRST_TRACK = ALL_RANKS + 3
"""First of the tracks that are numbered by module and bucket."""


BLOCK = 4096
"""Rows whose values are Python numbers at a time: those of all rows of a large step would take a gigabyte."""


def rows_of(*columns: npt.NDArray[Any]) -> Iterator[tuple[Any, ...]]:
    """Iterate over the rows of columns of one length, as tuples of Python numbers."""
    for begin in range(0, len(columns[0]), BLOCK):
        yield from zip(*(column[begin : begin + BLOCK].tolist() for column in columns), strict=True)


class StepArgs(msgspec.Struct, gc=False):
    """The step that a slice belongs to."""

    step: int


class BucketArgs(StepArgs, gc=False):
    """Facts of a bucket's slice."""

    bucket: int
    module: int


class UnitArgs(StepArgs, gc=False):
    """Facts of the slice of a unit's collective."""

    unit: str
    module: int


class MovingArgs(StepArgs, gc=False):
    """Facts of the movement of a bucket's bytes."""

    size_bytes: int
    bandwidth: float = msgspec.field(name="bandwidth_GB_s")


class WholeStepArgs(StepArgs, gc=False):
    """Facts of a whole step; `began` is the time of day in UTC, empty if unknown."""

    began: str


class Slice(msgspec.Struct, tag_field="ph", tag="X", gc=False):
    """A complete event.

    A dict would take several times the memory, and the garbage collector would visit it.
    """

    name: str
    pid: int
    tid: int
    ts: float
    dur: float
    args: StepArgs


class Moment(msgspec.Struct, tag_field="ph", tag="i", gc=False):
    """An event without duration, drawn over the tracks of its process (`s` is `p`)."""

    name: str
    pid: int
    tid: int
    ts: float
    args: dict[str, wire.Scalar]
    s: Literal["p"] = "p"


class ArrowStart(msgspec.Struct, tag_field="ph", tag="s", gc=False):
    """Start of an arrow, on the slice that is open at its time."""

    name: str
    cat: str
    id: int
    pid: int
    tid: int
    ts: float


class ArrowEnd(msgspec.Struct, tag_field="ph", tag="f", gc=False):
    """End of the arrow with the same `id`, on the slice that is open at its time (`bp` is `e`)."""

    name: str
    cat: str
    id: int
    pid: int
    tid: int
    ts: float
    bp: Literal["e"] = "e"


def name_process(rank: int, name: str) -> dict[str, Any]:
    """Return the event that names a process."""
    return _name("process_name", rank, 0, name)


def name_track(rank: int, track: int, name: str) -> dict[str, Any]:
    """Return the event that names a track of a process."""
    return _name("thread_name", rank, track, name)


def counter(name: str, unit: str, at_us: float, value: float) -> dict[str, Any]:
    """Return the event that sets a counter of all ranks. Perfetto shows the unit after the name."""
    return {"name": name, "ph": "C", "pid": ALL_RANKS, "ts": at_us, "args": {unit: value}}


def _name(kind: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}
