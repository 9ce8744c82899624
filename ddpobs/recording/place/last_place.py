"""The place of a process: phase, step, bucket and backward, in a file that outlives it.

A process that is killed runs no handler. Its place is in a small memory-mapped file, written by plain stores (about
25 ns each). The kernel keeps the file after any end of the process. A process of the same host reads it: a surviving
rank, `ddpobs run`, the next attempt, or `ddpobs push`. A process that ends in order removes its file.

`place_file.py` has the file's format. It lies in shared memory (`/dev/shm`), with a link in the spool's folder. A store
into a file on a disk may wait for that disk.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeAlias

from ddpobs import wire
from ddpobs.recording.place import early_place
from ddpobs.recording.place.place_file import (
    IDENTITY_AT,
    LAUNCH,
    MAGIC,
    SIZE,
    SUFFIX,
    PlaceIdentity,
    Slot,
    process_space,
)
from ddpobs.recording.probes import oom_kills

FOLDER = "places"
"""Folder of the places, inside of the spool's."""
_SHARED_MEMORY = Path("/dev/shm")


Slots: TypeAlias = "memoryview[int]"


class LastPlace:
    """The place of this process.

    Args:
        folder: Folder for the file. If it cannot be made, the place lives in memory alone.
        source: The process's source.

    Attributes:
        slots: The integers, by `Slot`. A store into them is all that the training thread does.
    """

    def __init__(self, folder: Path, source: str) -> None:
        self.slots: Slots = memory_slots()
        self._path: Path | None = None
        self._map: mmap.mmap | None = None
        with suppress(OSError):
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.lstat().st_uid != os.getuid():  # In a folder that is open to all, another user may have made it.
                raise PermissionError(errno.EPERM, "the folder belongs to another user", str(folder))
            path = folder / f"{source}{SUFFIX}"
            self._map = _create(path)
            self.slots = memoryview(self._map).cast("q")
            self._path = path
        self._pid = os.getpid()
        self._memory_events = oom_kills.path()
        self._fill()

    def _fill(self) -> None:
        slots = self.slots
        slots[Slot.PID], slots[Slot.STARTED] = self._pid, _started(self._pid)
        slots[Slot.WALL_NS], slots[Slot.MONOTONIC_NS] = time.time_ns(), time.monotonic_ns()
        slots[Slot.PHASE] = wire.PHASES.index("other")
        slots[Slot.AT_NS] = slots[Slot.ALIVE_NS] = slots[Slot.MONOTONIC_NS]
        slots[Slot.MODULE] = slots[Slot.BUCKET] = wire.UNKNOWN
        kills = oom_kills.count(self._memory_events)
        slots[Slot.OOM_KILLS] = wire.UNKNOWN if kills is None else kills
        slots[Slot.MAGIC] = MAGIC

    def note_interrupt(self, at_ns: int) -> None:
        """Store that SIGINT has arrived, in the open step; a repetition keeps the time of the first one."""
        slots = self.slots
        if not is_interrupted(slots):
            slots[Slot.INTERRUPTED_STEP], slots[Slot.INTERRUPTED_NS] = step_of(slots), at_ns

    @property
    def is_shared(self) -> bool:
        """Whether the place is in a file."""
        return self._path is not None

    def summary(self) -> dict[str, wire.Scalar]:
        """Return phase, module, bucket and finished backward passes, as an event reports them."""
        slots = self.slots
        module, bucket = bucket_of(slots)
        phase, synchronised = wire.PHASES[slots[Slot.PHASE]], slots[Slot.SYNCHRONISED]
        return {"phase": phase, "module": module, "bucket": bucket, "synchronised": synchronised}

    def identify(self, identity: PlaceIdentity) -> None:
        """Write the identity; a file without one is of no use to a reader. It replaces the rank's early place."""
        if self._map is not None:
            identity = replace(
                identity,
                process_space=process_space(),
                memory_events=str(self._memory_events or ""),
                launch=os.environ.get(LAUNCH, ""),
            )
            text = json.dumps(asdict(identity)).encode()
            if len(text) <= SIZE - IDENTITY_AT - 8:
                self._map[IDENTITY_AT : IDENTITY_AT + 8 + len(text)] = len(text).to_bytes(8, "little") + text
        early_place.note_joined(os.environ)

    def batch_built(self, seq: int, emitted: int, dropped: int) -> None:
        """Store the key and the counts of the latest batch."""
        slots = self.slots
        slots[Slot.NEXT_SEQ], slots[Slot.EMITTED], slots[Slot.DROPPED] = seq + 1, emitted, dropped

    def close(self) -> None:
        """Remove the file: the process ends in order."""
        if self._path is not None and os.getpid() == self._pid:
            with suppress(OSError):
                remove(self._path)
            self._path = None


def memory_slots() -> Slots:
    """Return slots in the memory of this process alone."""
    return memoryview(bytearray(IDENTITY_AT)).cast("q")


def bucket_of(slots: Slots) -> tuple[int, int]:
    """Return module and index of the bucket launched last in the backward under way; `wire.UNKNOWN` outside of one."""
    if wire.PHASES[slots[Slot.PHASE]] not in ("backward", "exposed_comm"):
        return wire.UNKNOWN, wire.UNKNOWN
    return slots[Slot.MODULE], slots[Slot.BUCKET]


def _create(path: Path) -> mmap.mmap:
    """Create a file of zeros and map it, in shared memory behind a link at `path`, or at `path` itself.

    The zeros are written: a store into a page that the disk cannot hold would end the process.
    """
    try:
        target = _SHARED_MEMORY / f"ddpobs-{os.getuid()}-{os.getpid()}-{path.name}"
        mapped = _create_file(target)
    except OSError:
        return _create_file(path)
    try:
        path.symlink_to(target)
    except OSError:
        target.unlink()
        raise
    return mapped


def _create_file(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            if file.write(bytes(SIZE)) != SIZE:
                raise OSError(errno.ENOSPC, "no room", str(path))
            return mmap.mmap(file.fileno(), SIZE)
    except OSError:
        path.unlink()
        raise


def remove(path: Path) -> None:
    """Remove a place and the file in shared memory that it links to."""
    if path.is_symlink() and (target := path.readlink()).parent == _SHARED_MEMORY:
        target.unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def is_interrupted(slots: Slots) -> bool:
    """Whether SIGINT arrived in the open step or in the step before.

    Training that goes on has caught the interrupt. A handler of the user's may finish the open step first.
    """
    return slots[Slot.INTERRUPTED_NS] > 0 and step_of(slots) - slots[Slot.INTERRUPTED_STEP] <= 1


def step_of(slots: Slots) -> int:
    """Return the number of the open step."""
    return slots[Slot.STEP] + slots[Slot.CLOSED] - slots[Slot.CLOSED_AT_STEP]


def _started(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0
