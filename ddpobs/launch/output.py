"""The last lines that a command under `ddpobs run` writes to stderr, for the report of a failure.

| stderr is | the command has | the lines are |
|---|---|---|
| a file | that file | read from the file, from the size at the start on |
| a pipe | a pipe, whose bytes go on at once and unchanged | kept in memory |
| a terminal, a socket, a device | the same | not known |

If stdout is the same pipe, the command has one pipe for both, so that their order stays. A full reader delays the
command as it does without `ddpobs run`, and one that is gone ends it. After the end of the command `cat` passes on what
processes that it left behind still write. It uses the standard library alone.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import stat
import threading
from contextlib import suppress
from pathlib import Path

MAX_BYTES = 8192
"""Maximum number of bytes that are kept."""
_PIECE_BYTES, _MAX_PIECES = 65536, 16
"""Bytes that are read at once, and the number of reads after the end of the command: a pipe holds at most 1 MiB."""
_STDOUT, _STDERR = 1, 2


class Output:
    """The stderr of one command.

    Args:
        descriptor: The end from which the command's pipe is read; -1 without a pipe.
        size: Size of the file at the start; -1 where stderr is no file.
    """

    def __init__(self, descriptor: int = -1, size: int = -1) -> None:
        self.descriptor, self._size = descriptor, size
        self._kept = bytearray()
        self._thread: threading.Thread | None = None
        self._wake = -1, -1

    @classmethod
    def begin(cls, *, keep: bool) -> tuple[Output, int]:
        """Prepare the output of a command that starts next.

        Args:
            keep: Whether the settings allow to keep the lines.

        Returns:
            The output, and the descriptor for the command's stderr; -1 for the one that it has.
        """
        with suppress(OSError):
            state = os.fstat(_STDERR)
            if keep and stat.S_ISREG(state.st_mode):
                return cls(size=state.st_size), -1
            if keep and stat.S_ISFIFO(state.st_mode) and shutil.which("cat"):
                read, write = os.pipe()
                return cls(read), write
        return cls(), -1

    @staticmethod
    def give(descriptor: int) -> None:
        """In the command's process: write to that descriptor instead of stderr, and of stdout if it is the same."""
        if descriptor < 0:
            return
        with suppress(OSError):
            if os.path.sameopenfile(_STDOUT, _STDERR):
                os.dup2(descriptor, _STDOUT)
        os.dup2(descriptor, _STDERR)
        os.close(descriptor)

    def hand_over(self) -> str:
        """Return the argument from which the program that replaces this one goes on."""
        if self.descriptor >= 0:
            os.set_inheritable(self.descriptor, True)
        return f"{self.descriptor}:{self._size}"

    @classmethod
    def taken_over(cls, argument: str) -> Output:
        """Go on with what `hand_over` returned."""
        descriptor, _, size = argument.partition(":")
        output = cls(int(descriptor), int(size))
        if output.descriptor >= 0:
            os.set_inheritable(output.descriptor, False)
            os.set_blocking(output.descriptor, False)
            output._wake = os.pipe()
            output._thread = threading.Thread(target=output._pass_on, name="ddpobs-output", daemon=True)
            output._thread.start()
        return output

    def last(self) -> bytes:
        """Return the last bytes so far."""
        if self._size < 0:
            return bytes(self._kept)
        with suppress(OSError), Path(f"/proc/self/fd/{_STDERR}").open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._size if self._size <= end else 0, end - MAX_BYTES))
            return file.read(MAX_BYTES)
        return b""

    def finish(self) -> None:
        """Pass on what the command has written; after its end."""
        if self._thread is not None:
            os.write(self._wake[1], b"\0")
            self._thread.join()

    def leave_behind(self) -> None:
        """Let `cat` pass on what other processes still write, until the last of them ends; after `finish`."""
        if self._thread is None or self.descriptor < 0:
            return
        os.set_blocking(self.descriptor, True)
        if program := shutil.which("cat"):
            actions = [
                (os.POSIX_SPAWN_DUP2, self.descriptor, 0),
                (os.POSIX_SPAWN_DUP2, _STDERR, 1),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_RDWR, 0),
            ]
            with suppress(OSError):
                os.posix_spawn(program, ["cat"], os.environ, file_actions=actions, setsigmask=signal.valid_signals())

    def _pass_on(self) -> None:
        poll, left = select.poll(), _MAX_PIECES
        poll.register(self.descriptor, select.POLLIN)
        poll.register(self._wake[0], select.POLLIN)
        while left:
            is_over = self._wake[0] in dict(poll.poll())
            left -= is_over
            try:
                data = os.read(self.descriptor, _PIECE_BYTES)
            except BlockingIOError:
                if is_over:
                    return
                continue
            if not data or not self._write(data):
                os.close(self.descriptor)  # Of a reader that is gone the command learns by SIGPIPE, as without us.
                self.descriptor = -1
                return
            self._kept = (self._kept + data)[-MAX_BYTES:]

    @staticmethod
    def _write(data: bytes) -> bool:
        """Write all to stderr; False if nobody reads it any more."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(_STDERR, view) :]
            except BlockingIOError:  # The reader may share its description with a program that made it so.
                select.select([], [_STDERR], [])
            except OSError:
                return False
        return True
