"""Reader of the places of dead processes (`last_place.py`)."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddpobs import wire
from ddpobs.recording.place.last_place import Slots, bucket_of, is_interrupted, remove, step_of
from ddpobs.recording.place.place_file import (
    IDENTITY_AT,
    SUFFIX,
    PlaceIdentity,
    Slot,
    identity_of,
    is_running,
    launch_interrupt_ended,
    process_space,
)
from ddpobs.recording.probes import oom_kills
from ddpobs.shared.silence import PLACE_SILENCE_NS


@dataclass(frozen=True)
class Place:
    """A process's place as its file has it.

    Attributes:
        identity: The process.
        pid: Its process number on its host.
        at_wall_ns: Wall-clock time of its end; the time at which it was last seen alive, at most a second before, if
            nobody saw the end.
        at_monotonic_ns: The same moment on its monotonic clock.
        phase: One of `wire.PHASES`.
        step: The open step.
        synchronised: Synchronised backward passes that ended.
        module: Module of the bucket launched last in the backward under way, `wire.UNKNOWN` outside of one.
        bucket: That bucket.
        next_seq: Sequence number of the batch after the last one that the process built.
        emitted: Count of emitted records in that batch.
        dropped: Count of dropped records in that batch.
        oom_kills: Out-of-memory kills in its cgroup since its start; None if they are not readable.
        exit_status: Exit status that its parent saw, negative for a signal; None if no parent recorded it.
        interrupted_ns: Monotonic time of the SIGINT that ended it, which it or its `ddpobs run` got; None without one.
        watched: Whether its `ddpobs run` watches it, and reports its end.
        orderly: Whether a rank without telemetry ran its exit handlers, and no parent saw an exit status of an error.
        path: The file, or the link to it.
    """

    identity: PlaceIdentity
    pid: int
    at_wall_ns: int
    at_monotonic_ns: int
    phase: str
    step: int
    synchronised: int
    module: int
    bucket: int
    next_seq: int
    emitted: int
    dropped: int
    oom_kills: int | None
    exit_status: int | None
    interrupted_ns: int | None
    watched: bool
    orderly: bool
    path: Path

    def remove(self) -> None:
        """Remove the file; another process may have done so."""
        with suppress(OSError):
            remove(self.path)


def places_of_the_dead(folder: Path) -> Iterator[Place]:
    """Return the places of processes that ended without removing their file.

    Any other file is passed over: cut, foreign, of a process that may still run, or of a rank without telemetry that
    ended in order.
    """
    return (place for place in _ended_places(folder) if not place.orderly)


def _ended_places(folder: Path) -> Iterator[Place]:
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        last_place = None
        with suppress(OSError, ValueError, TypeError, LookupError):
            last_place = _read(path)
        if last_place is not None:
            yield last_place


def note_exit(folder: Path, pid: int, status: int) -> None:
    """Write the exit status of a child that has ended, and now as its end, into its place; for the parent process.

    Args:
        folder: Folder of the places.
        pid: Process number of the child.
        status: Its exit status, negative for a signal, as `subprocess` returns it.
    """
    for last_place in _ended_places(folder):
        if last_place.pid == pid and last_place.identity.process_space == process_space():
            with suppress(OSError), last_place.path.open("r+b") as file:
                file.seek(8 * Slot.EXIT_SEEN)
                file.write(struct.pack("=qq", 1, status))
                if last_place.identity.stage:
                    file.seek(8 * Slot.ENDED_NS)
                    file.write(struct.pack("=q", time.monotonic_ns()))


def _read(path: Path) -> Place | None:
    data = path.read_bytes()
    slots = memoryview(data[:IDENTITY_AT]).cast("q")
    identity = identity_of(data)
    if identity is None:
        return None
    at_monotonic_ns = _at_monotonic_ns(slots)
    at_wall_ns = slots[Slot.WALL_NS] + at_monotonic_ns - slots[Slot.MONOTONIC_NS]
    if identity.process_space == process_space():
        if is_running(slots[Slot.PID], slots[Slot.STARTED]):
            return None
    elif time.time_ns() - at_wall_ns < PLACE_SILENCE_NS:
        return None
    return Place(
        identity=identity,
        pid=slots[Slot.PID],
        at_wall_ns=at_wall_ns,
        at_monotonic_ns=at_monotonic_ns,
        phase=wire.PHASES[slots[Slot.PHASE]],
        step=step_of(slots),
        synchronised=slots[Slot.SYNCHRONISED],
        module=bucket_of(slots)[0],
        bucket=bucket_of(slots)[1],
        next_seq=slots[Slot.NEXT_SEQ],
        emitted=slots[Slot.EMITTED],
        dropped=slots[Slot.DROPPED],
        oom_kills=_oom_kills_since(slots[Slot.OOM_KILLS], identity.memory_events),
        exit_status=slots[Slot.EXIT_STATUS] if slots[Slot.EXIT_SEEN] else None,
        interrupted_ns=_interrupted_ns(slots, launch_interrupt_ended(path.parent, identity.launch, at_wall_ns)),
        watched=bool(slots[Slot.WATCHED]),
        orderly=bool(slots[Slot.ORDERLY]) and not slots[Slot.EXIT_STATUS],
        path=path,
    )


def _at_monotonic_ns(slots: Slots) -> int:
    return slots[Slot.ENDED_NS] or max(slots[Slot.AT_NS], slots[Slot.ALIVE_NS])


def _interrupted_ns(slots: Slots, with_its_launch: bool) -> int | None:
    if is_interrupted(slots):
        return slots[Slot.INTERRUPTED_NS]
    return _at_monotonic_ns(slots) if with_its_launch else None


def _oom_kills_since(start: int, memory_events: str) -> int | None:
    now = oom_kills.count(Path(memory_events)) if memory_events else None
    return now - start if now is not None and 0 <= start <= now else None
