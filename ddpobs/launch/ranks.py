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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddpobs.recording.place.place_file import (
    IDENTITY_AT,
    SIZE,
    SUFFIX,
    Slot,
    identity_of,
    interrupt_file,
    is_running,
    process_space,
)

_LOOK_S = 1.0
_OTHERS_S = 0.5
"""Time for which a dead rank's place is left to torchrun, which knows the exit status."""
_AGAIN_S = 30.0
"""Pause after a report, which has failed if places are left."""
_LAST_ENDS_S = 1.0
"""Longest wait for the end of ranks after the command's end."""
_OLD_S = 86_400.0
_PHASES = 6
"""Number of `wire.PHASES`, of which `other` is the last."""
_REPORT = "import sys; sys.path.append(sys.argv[3]); from ddpobs.launch.report import main; main(*sys.argv[1:3])"


@dataclass
class _Rank:
    """A rank of this launch; `ended_s` is 0 while its process runs."""

    path: Path
    pid: int
    started: int
    descriptor: int = -1
    ended_s: float = 0.0


class Ranks:
    """Watches the ranks of one launch on this host, from its creation on.

    Args:
        folder: Folder of the places, which the first rank makes.
        launch: Id of this `ddpobs run`; ranks of others are left alone.
        root: Folder of the package ddpobs, for the report.
        mask: Signals that the report's process blocks.

    Attributes:
        reports: Process numbers of the reports under way.
    """

    def __init__(self, folder: Path, launch: str, root: str, mask: set[int]) -> None:
        self._folder, self._launch, self._root, self._mask = folder, launch, root, mask
        self._space = process_space()
        self._clocks = time.time_ns(), time.monotonic_ns()
        self._ranks: dict[str, _Rank | None] = {}
        self._poll = select.poll()
        self._lock = threading.Lock()
        self._again_s = 0.0
        self.reports: set[int] = set()
        threading.Thread(target=self._watch, name="ddpobs-ranks", daemon=True).start()

    def note_interrupt(self) -> None:
        """Show the ranks, and whoever reports them, that SIGINT has arrived."""
        with suppress(OSError):
            interrupt_file(self._folder, self._launch).write_bytes(b"")

    def reported(self, pid: int) -> None:
        """Note the end of a report's process."""
        self.reports.discard(pid)

    def finish(self) -> None:
        """Report at once the ranks that did not end in order; for the end of the command."""
        until = time.monotonic() + _LAST_ENDS_S
        while True:
            with self._lock:
                self._look(watched=False)
                running = any(rank is not None and not rank.ended_s for rank in self._ranks.values())
            if not running or time.monotonic() >= until:
                break
            time.sleep(0.01)
        with self._lock:
            self._report(0.0)

    def close(self) -> None:
        """Remove the note of an interrupt, unless a rank's place still needs it, and old ones of other launches."""
        with suppress(OSError):
            for note in self._folder.glob(interrupt_file(Path(), "*").name):
                is_own = note == interrupt_file(self._folder, self._launch)
                is_needed = any(rank is not None and rank.path.exists() for rank in list(self._ranks.values()))
                if (is_own and not is_needed) or time.time() - note.stat().st_mtime > _OLD_S:
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
        if (identity.launch, identity.process_space) != (self._launch, self._space):
            self._ranks[name] = None
            return
        slots = memoryview(page[:IDENTITY_AT]).cast("q")
        rank = self._ranks[name] = _Rank(path, slots[Slot.PID], slots[Slot.STARTED])
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
            if now_ns:
                with suppress(OSError):
                    # One pair of clocks for all: those of the ranks, each read apart, would mix up close ends.
                    _write(rank.path, Slot.WALL_NS, *self._clocks)
                    _write(rank.path, Slot.ENDED_NS, now_ns + order)

    def _forget(self, rank: _Rank | None) -> None:
        if rank is not None and rank.descriptor >= 0:
            with suppress(KeyError):
                self._poll.unregister(rank.descriptor)
            os.close(rank.descriptor)
            rank.descriptor = -1

    def _report(self, after_s: float) -> None:
        """Start a report if a rank ended that long ago and its place is still there."""
        due_s = time.monotonic() - after_s
        ended = [rank for rank in self._ranks.values() if rank is not None and rank.ended_s]
        if self.reports or not any(rank.ended_s <= due_s for rank in ended):
            return
        self._again_s = time.monotonic() + _AGAIN_S
        command = [sys.executable, "-P", "-c", _REPORT, str(self._folder), self._launch, self._root]
        with suppress(OSError):
            # A group of its own: Ctrl-C must not end the report of the ranks that it ended.
            pid = os.posix_spawn(sys.executable, command, os.environ, setpgroup=0, setsigmask=self._mask)
            self.reports.add(pid)


def _progress(rank: _Rank) -> tuple[int, int]:
    """Position of a rank in its training: finished backward passes, and the phase; a step begins in `other`."""
    try:
        slots = memoryview(rank.path.read_bytes()[:IDENTITY_AT]).cast("q")
        return slots[Slot.SYNCHRONISED], (slots[Slot.PHASE] + 1) % _PHASES
    except (OSError, ValueError, LookupError):
        return 0, 0


def _write(path: Path, first: Slot, *values: int) -> None:
    """Write slots of a rank's place from the first on; the rank has ended, or does not write them."""
    with path.open("r+b") as file:
        if file.seek(0, os.SEEK_END) == SIZE:
            file.seek(8 * first)
            file.write(struct.pack(f"={len(values)}q", *values))
