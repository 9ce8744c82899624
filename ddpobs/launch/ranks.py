"""Watch over the ranks of one `ddpobs run`: when each ends, and the report of those that did not end in order.

It uses the standard library alone; `report.py` sends, in a process of its own that lives for a moment. A descriptor of
each process (`pidfd_open(2)`) wakes the watch when the process ends. So the order of the ends is known even if a
launcher kills the other ranks within milliseconds.
"""

from __future__ import annotations

import os
import select
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddpobs.launch.host_check.order import SLOW_HOST, noted
from ddpobs.recording.place.place_file import (
    IDENTITY_AT,
    PHASES,
    SIZE,
    SUFFIX,
    Slot,
    explained_file,
    hosts_file,
    identity_of,
    imported_file,
    interrupt_file,
    is_running,
    joined_file,
    process_space,
)
from ddpobs.recording.probes import oom_kills

_LOOK_S = 1.0
_OTHERS_S = 0.5
"""Time for which a dead rank's place is left to torchrun, which knows the exit status."""
_AGAIN_S = 30.0
"""Pause after a report, which has failed if places are left."""
_LAST_ENDS_S = 1.0
"""Longest wait for the end of ranks after the command's end."""
_OLD_S = 86_400.0
_REPORT = "import sys; sys.path.append(sys.argv.pop(1)); from ddpobs.launch.report import main; main(*sys.argv[1:])"


@dataclass(frozen=True)
class Launch:
    """A `ddpobs run`.

    Attributes:
        id: Its id; ranks of others are left alone.
        script: Name of the command's script, or of its program.
        root: Folder of the package ddpobs, for the report.
        mask: Signals that the report's process blocks.
    """

    id: str
    script: str
    root: str
    mask: set[int]


@dataclass
class _Rank:
    """A rank of this launch; `ended_s` is 0 while its process runs, and an early one has no telemetry yet."""

    path: Path
    pid: int
    started: int
    is_early: bool
    descriptor: int = -1
    ended_s: float = 0.0


class Ranks:
    """Watches the ranks of one launch on this host, from its creation on.

    Args:
        folder: Folder of the places, which the first rank makes.
        launch: This `ddpobs run`.
        output: Returns the last bytes that the command has written to stderr.

    Attributes:
        reports: Process numbers of the reports under way.
    """

    def __init__(self, folder: Path, launch: Launch, output: Callable[[], bytes]) -> None:
        self._folder, self._launch, self._output = folder, launch, output
        self._space = process_space()
        self._memory_events = oom_kills.path()
        self._kills = oom_kills.count(self._memory_events)
        self._clocks = time.time_ns(), time.monotonic_ns()
        self._ranks: dict[str, _Rank | None] = {}
        self._poll = select.poll()
        self._lock = threading.Lock()
        self._again_s = 0.0
        self.reports: set[int] = set()
        threading.Thread(target=self._watch, name="ddpobs-ranks", daemon=True).start()

    def checked(self) -> int | None:
        """Return what a rank on this host noted of the check of the hosts: `SLOW_HOST`, 0, or None without a check."""
        return noted(self._folder, self._launch.id)

    def saw_no_model(self) -> bool:
        """Whether a process of the command imported torch, no rank joined, and none printed the reason."""
        imported, joined, explained = (
            file(self._folder, self._launch.id).exists() for file in (imported_file, joined_file, explained_file)
        )
        return imported and not (joined or explained)

    def note_interrupt(self) -> None:
        """Show the ranks, and whoever reports them, that SIGINT has arrived."""
        with suppress(OSError):
            interrupt_file(self._folder, self._launch.id).write_bytes(b"")

    def reported(self, pid: int) -> None:
        """Note the end of a report's process."""
        self.reports.discard(pid)

    def finish(self, pid: int, status: int) -> None:
        """Report at once the ranks that did not end in order, or the command if it failed before any rank joined.

        Args:
            pid: Process number of the command, which may be a rank.
            status: Its exit status, negative for a signal.
        """
        until = time.monotonic() + _LAST_ENDS_S
        while True:
            with self._lock:
                self._look(watched=False)
                running = any(rank is not None and not rank.ended_s for rank in self._ranks.values())
            if not running or time.monotonic() >= until:
                break
            time.sleep(0.01)
        with self._lock:
            for rank in self._ranks.values():
                if rank is not None and rank.pid == pid:
                    with suppress(OSError):
                        _write(rank.path, Slot.EXIT_SEEN, 1, status)
            is_explained = joined_file(self._folder, self._launch.id).exists() or self.checked() == SLOW_HOST
            self._report(0.0, 0 if is_explained else status)

    def close(self) -> None:
        """Remove the notes, but that of an interrupt if a rank's place still needs it, and old ones of other launches.

        Places that nobody has reported stay for the next attempt, unless their rank ended in order.
        """
        ranks = [rank for rank in list(self._ranks.values()) if rank is not None]
        with suppress(OSError):
            is_needed = any(rank.path.exists() for rank in ranks if not _ended_in_order(rank))
            for launch in (self._launch.id, "*"):
                for file in (interrupt_file, joined_file, hosts_file, imported_file, explained_file):
                    for note in self._folder.glob(file(Path(), launch).name):
                        is_own = launch != "*" and not (is_needed and file is interrupt_file)
                        if is_own or time.time() - note.stat().st_mtime > _OLD_S:
                            note.unlink(missing_ok=True)

    def _watch(self) -> None:
        while True:
            ready = self._poll.poll(_LOOK_S * 1000)
            now_ns, descriptors = time.monotonic_ns(), {descriptor for descriptor, _ in ready}
            with self._lock:
                self._end([rank for rank in self._ranks.values() if rank and rank.descriptor in descriptors], now_ns)
                self._look(watched=True)
                if time.monotonic() >= self._again_s:
                    self._report(_OTHERS_S)

    def _look(self, *, watched: bool) -> None:
        """Find new places, and ranks that ended without a descriptor; new ones get one if they are `watched`."""
        names = set()
        with suppress(OSError), os.scandir(self._folder) as entries:
            names = {entry.name for entry in entries if entry.name.endswith(SUFFIX)}
        for name in self._ranks.keys() - names:
            self._forget(self._ranks.pop(name))
        for name in names - self._ranks.keys():
            with suppress(OSError, ValueError, TypeError, LookupError):
                self._meet(name, watched)
        unwatched = [rank for rank in self._ranks.values() if rank and rank.descriptor < 0 and not rank.ended_s]
        self._end([rank for rank in unwatched if not is_running(rank.pid, rank.started)], 0)

    def _meet(self, name: str, watched: bool) -> None:
        path = self._folder / name
        page = path.read_bytes()
        identity = identity_of(page)
        if identity is None:
            return
        if (identity.launch, identity.process_space) != (self._launch.id, self._space):
            self._ranks[name] = None
            return
        slots = memoryview(page[:IDENTITY_AT]).cast("q")
        rank = self._ranks[name] = _Rank(path, slots[Slot.PID], slots[Slot.STARTED], bool(identity.stage))
        if watched:
            with suppress(OSError):
                _write(path, Slot.WATCHED, 1)
            with suppress(OSError, AttributeError):  # An old kernel: each look tests the process.
                rank.descriptor = os.pidfd_open(rank.pid)
                if is_running(rank.pid, rank.started):  # Else the number may be another process's by now.
                    self._poll.register(rank.descriptor, select.POLLIN)
                else:
                    self._forget(rank)

    def _end(self, ranks: list[_Rank], now_ns: int) -> None:
        """Note the end of ranks, at a moment that is 0 if it is not known; of several, that of the last one first.

        Ranks wait for each other, so the one that was killed is not ahead of those that its launcher killed for it.
        """
        for order, rank in enumerate(sorted(ranks, key=_progress)):
            rank.ended_s = time.monotonic()
            self._forget(rank)
            # The place of a rank without telemetry has the time of its start alone.
            ended_ns = now_ns or (time.monotonic_ns() if rank.is_early else 0)
            if ended_ns and not _has_end(rank):
                with suppress(OSError):
                    # One pair of clocks for all: those of the ranks, each read apart, would mix up close ends.
                    _write(rank.path, Slot.WALL_NS, *self._clocks)
                    _write(rank.path, Slot.ENDED_NS, ended_ns + order)

    def _forget(self, rank: _Rank | None) -> None:
        if rank is not None and rank.descriptor >= 0:
            with suppress(KeyError):
                self._poll.unregister(rank.descriptor)
            os.close(rank.descriptor)
            rank.descriptor = -1

    def _report(self, after_s: float, status: int = 0) -> None:
        """Start a report if a rank ended that long ago and its place is still there, or for a command's exit status."""
        due_s = time.monotonic() - after_s
        ended = [rank for rank in self._ranks.values() if rank is not None and rank.ended_s and rank.ended_s <= due_s]
        if self.reports or not ([rank for rank in ended if not _ended_in_order(rank)] or status):
            return
        self._again_s = time.monotonic() + _AGAIN_S
        kills = oom_kills.count(self._memory_events)
        killed = max(0, kills - self._kills) if kills is not None and self._kills is not None else 0
        launch = self._launch
        arguments = [launch.root, str(self._folder), launch.id, launch.script, str(status), str(killed)]
        with suppress(OSError):
            read, write = os.pipe()
            try:
                os.write(write, self._output())  # It is less than a pipe holds.
                os.close(write)
                # A group of its own: Ctrl-C must not end the report of the ranks that it ended.
                pid = os.posix_spawn(
                    sys.executable,
                    [sys.executable, "-P", "-c", _REPORT, *arguments],
                    os.environ,
                    file_actions=[(os.POSIX_SPAWN_DUP2, read, 0)],
                    setpgroup=0,
                    setsigmask=launch.mask,
                )
                self.reports.add(pid)
            finally:
                os.close(read)


def _has_end(rank: _Rank) -> bool:
    """Whether the rank's parent has noted its end."""
    with suppress(OSError, ValueError):
        return bool(memoryview(rank.path.read_bytes()[:IDENTITY_AT]).cast("q")[Slot.ENDED_NS])
    return True


def _ended_in_order(rank: _Rank) -> bool:
    """Whether a rank without telemetry ran its exit handlers, and no parent saw an error; its place is removed then."""
    try:
        slots = memoryview(rank.path.read_bytes()[:IDENTITY_AT]).cast("q")
    except (OSError, ValueError):
        return True
    if is_orderly := bool(slots[Slot.ORDERLY]) and not slots[Slot.EXIT_STATUS]:
        with suppress(OSError):
            rank.path.unlink(missing_ok=True)
    return is_orderly


def _progress(rank: _Rank) -> tuple[int, int]:
    """Position of a rank in its training: finished backward passes, and the phase; a step begins in `other`."""
    try:
        slots = memoryview(rank.path.read_bytes()[:IDENTITY_AT]).cast("q")
        return slots[Slot.SYNCHRONISED], (slots[Slot.PHASE] + 1) % PHASES
    except (OSError, ValueError, LookupError):
        return 0, 0


def _write(path: Path, first: Slot, *values: int) -> None:
    """Write slots of a rank's place from the first on; the rank has ended, or does not write them."""
    with path.open("r+b") as file:
        if file.seek(0, os.SEEK_END) == SIZE:
            file.seek(8 * first)
            file.write(struct.pack(f"={len(values)}q", *values))
