"""The place of a process: phase, step, bucket and backward, in a file that outlives it.

A process that is killed runs no handler. Its place is in a small memory-mapped file, written by plain stores (about
25 ns each), so that the kernel keeps it whatever ends the process. A process of the same host reads it: a surviving
rank, the next attempt, or `ddpobs push`. A process that ends in order removes its file.

The file has one page: eight-byte integers (`Slot`), and from byte 512 on the identity as JSON.
"""

from __future__ import annotations

import array
import json
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path

from ddpobs import wire

_MAGIC = 0x64647070_00000001
_SIZE, _IDENTITY_AT = 4096, 512
_SUFFIX = ".place"
_RUNS = frozenset("RSDTtIWPK")
"""States in /proc/PID/stat of a process that is not dead."""


class Slot(IntEnum):
    """Where each integer lies."""

    MAGIC = 0
    PID = 1
    STARTED = 2
    """Start time of the process in clock ticks, from /proc: process numbers are used again."""
    WALL_NS = 3
    MONOTONIC_NS = 4
    """Both clocks, read together when the file was made."""
    PHASE = 5
    """Index into `wire.PHASES`."""
    AT_NS = 6
    """Monotonic time of the last event of the training thread."""
    STEP = 7
    """Number of the open step when the telemetry thread looked last."""
    STEP_SYNCHRONISED = 8
    """`SYNCHRONISED` at that look."""
    SYNCHRONISED = 9
    """Synchronised backward passes that ended."""
    MODULE = 10
    BUCKET = 11
    """Module and index of the bucket that was launched last."""


@dataclass(frozen=True)
class PlaceIdentity:
    """Whose place it is."""

    run: str
    attempt: str
    source: str
    rank: int
    world_size: int
    host: str


@dataclass(frozen=True)
class Place:
    """A process's place as its file has it.

    Attributes:
        identity: Whose it is.
        pid: Its process number on this host.
        at_wall_ns: Wall-clock time of its last event.
        phase: One of `wire.PHASES`.
        step: The step in which it was; exact where a step has one synchronised backward.
        synchronised: Synchronised backward passes that ended.
        module: Module of the bucket launched last, `wire.UNKNOWN` before the first.
        bucket: That bucket.
        path: The file.
    """

    identity: PlaceIdentity
    pid: int
    at_wall_ns: int
    phase: str
    step: int
    synchronised: int
    module: int
    bucket: int
    path: Path


class LastPlace:
    """This process's place.

    Args:
        folder: Folder for the file; where it cannot be made, the place lives in memory alone.
        source: The process's source.

    Attributes:
        slots: The integers, by `Slot`. A store into them is all that the training thread does.
    """

    def __init__(self, folder: Path, source: str) -> None:
        self.slots: memoryview | array.array[int] = array.array("q", bytes(_IDENTITY_AT))
        self._path: Path | None = None
        self._map: mmap.mmap | None = None
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = folder / f"{source}{_SUFFIX}"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.ftruncate(descriptor, _SIZE)
                self._map = mmap.mmap(descriptor, _SIZE)
            finally:
                os.close(descriptor)
            self.slots = memoryview(self._map).cast("q")
            self._path = path
        self._pid = os.getpid()
        self._fill()

    def _fill(self) -> None:
        slots = self.slots
        slots[Slot.PID], slots[Slot.STARTED] = self._pid, _started(self._pid)
        slots[Slot.WALL_NS], slots[Slot.MONOTONIC_NS] = time.time_ns(), time.monotonic_ns()
        slots[Slot.PHASE], slots[Slot.AT_NS] = wire.PHASES.index("other"), slots[Slot.MONOTONIC_NS]
        slots[Slot.MODULE] = slots[Slot.BUCKET] = wire.UNKNOWN
        slots[Slot.MAGIC] = _MAGIC

    def identify(self, identity: PlaceIdentity) -> None:
        """Write the identity; a file without one is of no use to a reader."""
        if self._map is not None:
            text = json.dumps(asdict(identity)).encode()[: _SIZE - _IDENTITY_AT - 8]
            self._map[_IDENTITY_AT : _IDENTITY_AT + 8 + len(text)] = len(text).to_bytes(8, "little") + text

    def close(self) -> None:
        """Remove the file: the process ends in order."""
        if self._path is not None and os.getpid() == self._pid:
            self._path.unlink(missing_ok=True)
            self._path = None


def places_of_the_dead(folder: Path) -> Iterator[Place]:
    """Places of processes of this host that ended without removing their file."""
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        place = None
        with suppress(OSError, ValueError, TypeError, LookupError):
            place = _read(path)
        if place is not None:
            yield place


def _read(path: Path) -> Place | None:
    data = path.read_bytes()
    slots = memoryview(data[:_IDENTITY_AT]).cast("q")
    length = int.from_bytes(data[_IDENTITY_AT : _IDENTITY_AT + 8], "little")
    if slots[Slot.MAGIC] != _MAGIC or not 0 < length < _SIZE or _runs(slots[Slot.PID], slots[Slot.STARTED]):
        return None
    identity = PlaceIdentity(**json.loads(data[_IDENTITY_AT + 8 : _IDENTITY_AT + 8 + length]))
    return Place(
        identity=identity,
        pid=slots[Slot.PID],
        at_wall_ns=slots[Slot.WALL_NS] + slots[Slot.AT_NS] - slots[Slot.MONOTONIC_NS],
        phase=wire.PHASES[slots[Slot.PHASE]],
        step=slots[Slot.STEP] + slots[Slot.SYNCHRONISED] - slots[Slot.STEP_SYNCHRONISED],
        synchronised=slots[Slot.SYNCHRONISED],
        module=slots[Slot.MODULE],
        bucket=slots[Slot.BUCKET],
        path=path,
    )


def _runs(pid: int, started: int) -> bool:
    """Whether the process still runs; a zombie does not. Where /proc is missing, it counts as running."""
    if not Path("/proc/self/stat").exists():
        return True
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] in _RUNS and int(fields[19]) == started


def _started(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0
