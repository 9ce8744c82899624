"""Format of the file with a process's place (`last_place.py`), read with the standard library alone.

A file has one page: eight-byte integers (`Slot`), and from byte 512 on the identity as JSON. `ddpobs run` waits for
ranks with little memory, so this module imports neither numpy nor the wire.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

MAGIC = 0x64647070_00000002
SIZE, IDENTITY_AT = 4096, 512
SUFFIX = ".place"
LAUNCH = "DDPOBS_LAUNCH"
"""Environment variable with the id of the `ddpobs run` that started the process."""
PLACES = "DDPOBS_PLACES"
"""Environment variable with the folder in which that `ddpobs run` looks for places."""
PHASES = 6
"""Number of `wire.PHASES`, of which `other` is the last."""
_RUNNING = frozenset("RSDTtIWPK")
"""States in /proc/PID/stat of a process that is not dead."""
_BEFORE_NS, _EFFECT_NS = 1_500_000_000, 60 * 10**9
"""A process that an interrupt ended was alive last from a moment before the interrupt to a minute after it.

Launchers kill the remaining ranks after half a minute.
"""


class Slot(IntEnum):
    """Index of each integer."""

    MAGIC = 0
    PID = 1
    STARTED = 2
    """Start time of the process in clock ticks, from /proc: process numbers are used again."""
    WALL_NS = 3
    MONOTONIC_NS = 4
    """Both clocks, read together when the file was made."""
    PHASE = 5
    """Index into `wire.PHASES`. After an error it stays the phase of the error."""
    AT_NS = 6
    """Monotonic time of the last event of the training thread."""
    STEP = 7
    """Number of the open step at the last replay."""
    CLOSED_AT_STEP = 8
    """`CLOSED` at that replay."""
    CLOSED = 9
    """Steps that the training thread has closed, by a simpler rule than the replay's."""
    SYNCHRONISED = 10
    """Synchronised backward passes that ended."""
    MODULE = 11
    BUCKET = 12
    """Module and index of the bucket that was launched last."""
    ALIVE_NS = 13
    """Monotonic time at which the telemetry thread ran last."""
    NEXT_SEQ = 14
    EMITTED = 15
    DROPPED = 16
    """Sequence number of the next batch, and the counts of the last one."""
    OOM_KILLS = 17
    """The cgroup's count of out-of-memory kills at the start; -1 if it is not readable."""
    EXIT_SEEN = 18
    """1 once the parent process has seen the end."""
    EXIT_STATUS = 19
    """Exit status that the parent saw; negative for a signal."""
    INTERRUPTED_NS = 20
    """Monotonic time of the latest SIGINT; 0 without one."""
    INTERRUPTED_STEP = 21
    """Number of the step that was open then."""
    ENDED_NS = 22
    """Monotonic time at which `ddpobs run` saw the process end; 0 if it did not."""
    WATCHED = 23
    """1 once the `ddpobs run` that started the process watches it, and will report its end."""
    ORDERLY = 24
    """1 if a rank without telemetry ran its exit handlers: only an exit status of an error makes it a failure."""


@dataclass(frozen=True)
class PlaceIdentity:
    """The process that a place belongs to.

    Attributes:
        run: Its run.
        attempt: Its attempt.
        source: Its source.
        rank: Its rank.
        world_size: Number of ranks.
        host: Name of its host.
        process_space: Boot and namespace in which its process number is valid.
        memory_events: File with the out-of-memory count of its cgroup; empty if there is none.
        launch: The `ddpobs run` that started it, by its `LAUNCH`; empty if none did.
        stage: `start` for a rank that has no telemetry yet; else empty.
    """

    run: str
    attempt: str
    source: str
    rank: int
    world_size: int
    host: str
    process_space: str = ""
    memory_events: str = ""
    launch: str = ""
    stage: str = ""


def identity_of(page: bytes) -> PlaceIdentity | None:
    """Return the identity in a file's content; None if there is none yet.

    Raises:
        ValueError: The content is none of a place.
        TypeError: Another version wrote it.
    """
    slots = memoryview(page[:IDENTITY_AT]).cast("q")
    length = int.from_bytes(page[IDENTITY_AT : IDENTITY_AT + 8], "little")
    if slots[Slot.MAGIC] != MAGIC or not 0 < length < SIZE:
        return None
    return PlaceIdentity(**json.loads(page[IDENTITY_AT + 8 : IDENTITY_AT + 8 + length]))


def process_space() -> str:
    """Return the boot and the namespace in which process numbers of this process are valid."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(parts)


def is_running(pid: int, started: int) -> bool:
    """Whether the process still runs; a zombie does not. If /proc is missing, it counts as running."""
    if not Path("/proc/self/stat").exists():
        return True
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] in _RUNNING and int(fields[19]) == started


def launch_was_interrupted(folder: Path, within_s: float) -> bool:
    """Whether the `ddpobs run` of this process got SIGINT; waits that long for its note in the folder of the places."""
    launch, until = os.environ.get(LAUNCH, ""), time.monotonic() + within_s
    while launch and time.monotonic() < until:
        if launch_interrupt_ended(folder, launch, time.time_ns()):
            return True
        time.sleep(within_s / 10)
    return False


def launch_interrupt_ended(folder: Path, launch: str, at_wall_ns: int) -> bool:
    """Whether a SIGINT to that `ddpobs run` explains the end of a process that was alive last at that time."""
    with suppress(OSError):
        after_ns = at_wall_ns - interrupt_file(folder, launch).stat().st_mtime_ns
        return -_BEFORE_NS <= after_ns < _EFFECT_NS
    return False


def interrupt_file(folder: Path, launch: str) -> Path:
    """Return the file whose time of change is the latest SIGINT to that `ddpobs run`."""
    return folder / f"{launch}.interrupted"


def joined_file(folder: Path, launch: str) -> Path:
    """Return the file that exists once a rank under that `ddpobs run` has reported itself."""
    return folder / f"{launch}.joined"


def imported_file(folder: Path, launch: str) -> Path:
    """Return the file that exists once a process under that `ddpobs run` has imported torch."""
    return folder / f"{launch}.torch"


def explained_file(folder: Path, launch: str) -> Path:
    """Return the file that exists once a rank under that `ddpobs run` has printed why it has no telemetry."""
    return folder / f"{launch}.explained"


def hosts_file(folder: Path, launch: str) -> Path:
    """Return the file in which a rank under that `ddpobs check-hosts` notes the result."""
    return folder / f"{launch}.hosts"
