"""A witness of signals to the whole process group, which show no sign of it where they arrive.

It is a `cat` in the same group that blocks all signals and never handles one, so that each stays pending in it. If a
signal is pending there too, it was sent to the group, as `timeout` does, or to each process, as `scancel` does. The
command has got it then. The witness ends with this process, whose pipe it reads.
"""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path


class Witness:
    """The witness; without `cat` or /proc, every signal counts as sent to this process alone.

    Args:
        pid: Process number of a witness that was started before; 0 for none.
        pipe: Both ends of the pipe that it reads.
    """

    def __init__(self, pid: int, pipe: tuple[int, int]) -> None:
        self._pid, self.pipe = pid, pipe
        self._seen: set[int] = set()
        self._doubtful: set[int] = set()
        """Signals that both the witness and the one before it may have got: not to be lost, they count as not seen."""

    @classmethod
    def begin(cls) -> Witness:
        """Start a witness."""
        witness = cls(0, os.pipe())
        witness._start()
        return witness

    def hand_over(self) -> list[str]:
        """Return the arguments with which the program that replaces this one goes on with the witness."""
        for descriptor in self.pipe:
            os.set_inheritable(descriptor, True)
        return [str(number) for number in (self._pid, *self.pipe)]

    def _start(self) -> None:
        if program := shutil.which("cat"):
            with suppress(OSError):
                null = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in (1, 2)]
                streams = [(os.POSIX_SPAWN_DUP2, self.pipe[0], 0), *null]
                mask = signal.valid_signals()
                self._pid = os.posix_spawn(program, ["cat"], os.environ, file_actions=streams, setsigmask=mask)

    def saw(self, number: int) -> bool:
        """Whether the group got this signal too; forgets it, so that each signal is to be asked about once."""
        if number in self._seen:
            self._seen.discard(number)
            return True
        if number not in _pending(self._pid):
            return False
        is_known = number not in self._doubtful
        before = self._pid
        self._start()  # Before the end of the other one, so that no signal meets neither.
        pending = _pending(before)
        self._seen |= pending - self._doubtful - {number}
        self._doubtful = pending & _pending(self._pid)
        with suppress(OSError):
            os.kill(before, signal.SIGKILL)
        return is_known

    def ended(self, pid: int) -> None:
        """Note that a child process has ended, which may be this witness."""
        if pid == self._pid:
            self._pid = 0


def _pending(pid: int) -> set[int]:
    """Signals that wait in a process."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if pid and line.startswith("ShdPnd:"):
                bits = int(line.split()[1], 16)
                return {number for number in range(1, signal.NSIG) if bits >> (number - 1) & 1}
    return set()
