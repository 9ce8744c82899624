"""The process's answer to SIGTERM, and its note of SIGINT.

Python runs no exit handlers at SIGTERM, and launchers send it to survivors. So telemetry is flushed first. Only the
default action is replaced, and it still ends the process. A handler of the user's stays in charge, set before or later.

SIGINT keeps its handler. It is only noted, because the end that follows may not show it: a framework catches
KeyboardInterrupt and ends in order, or a collective that another rank has left raises first.

Python delivers a signal to its main thread, which may hang in a collective and never return to the interpreter. So the
C-level handler writes to a pipe (`signal.set_wakeup_fd`), and a thread reads it. After SIGTERM it flushes, restores the
default action and sends the signal again. The process then ends by SIGTERM, as its parent expects.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_SIGTERM, _SIGINT = signal.SIGTERM, signal.SIGINT
_JOIN_S = 1.0
_installed: weakref.WeakSet[Termination] = weakref.WeakSet()


class Termination:
    """The process's answer to SIGTERM and SIGINT, as long as it is installed.

    Args:
        flush: Sends or spools all that was recorded; called on another thread than the main one, bounded in time.
        interrupted: Notes SIGINT; called on that thread too, whichever handler the signal has.
    """

    def __init__(self, flush: Callable[[], object], interrupted: Callable[[], object] = lambda: None) -> None:
        self._flush, self._interrupted = flush, interrupted
        self._handler = self._wake
        self._write = self._read = -1
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def install(self) -> bool:
        """Watch both signals; False where the process has another wake-up descriptor, or this is not its main thread.

        The action of SIGTERM is taken over only if it is the default one.
        """
        if threading.current_thread() is not threading.main_thread():
            return False
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        previous = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if previous != -1:
            signal.set_wakeup_fd(previous)
            self._close_pipe()
            return False
        try:
            self._start()
        except BaseException:
            self._restore()
            self._close_pipe()
            raise
        _installed.add(self)
        return True

    def _start(self) -> None:
        if signal.getsignal(_SIGTERM) == signal.SIG_DFL:
            signal.signal(_SIGTERM, self._handler)
        thread = threading.Thread(target=self._run, args=(self._read,), name="ddpobs-signals", daemon=True)
        thread.start()
        self._thread = thread

    def remove(self) -> None:
        """Restore the default action, unless another handler came since.

        Python allows it on the main thread alone. On another one, everything stays, and `flush` is still called.
        """
        if self._write < 0 or os.getpid() != self._pid or threading.current_thread() is not threading.main_thread():
            return
        self._restore()
        os.write(self._write, b"\0")
        os.close(self._write)
        self._write = -1
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _restore(self) -> None:
        if signal.getsignal(_SIGTERM) == self._handler:
            signal.signal(_SIGTERM, signal.SIG_DFL)
        current = signal.set_wakeup_fd(-1)
        if current != self._write:
            signal.set_wakeup_fd(current)

    def _wake(self, _number: int, _frame: Any) -> None:
        """Run on the main thread; of use where another wake-up descriptor was set since."""
        if signal.getsignal(_SIGTERM) == self._handler and self._write >= 0:
            os.write(self._write, bytes([_SIGTERM]))

    def _run(self, read: int) -> None:
        while number := os.read(read, 1):
            if number == b"\0":
                break
            if number[0] == _SIGINT:
                with suppress(Exception):
                    self._interrupted()
            if number[0] == _SIGTERM and signal.getsignal(_SIGTERM) == self._handler:
                with suppress(Exception):
                    self._flush()
                ctypes.CDLL(None).signal(int(_SIGTERM), None)
                os.kill(os.getpid(), _SIGTERM)
        os.close(read)

    def _close_pipe(self) -> None:
        os.close(self._read)
        os.close(self._write)
        self._read = self._write = -1


def _restore_in_child() -> None:
    """In a forked child (a loader worker) no thread reads the pipe: SIGTERM ends it at once."""
    for termination in list(_installed):
        if termination._write >= 0:
            termination._restore()


os.register_at_fork(after_in_child=_restore_in_child)
