"""Process-group threads and the interpreter: keep their thread state, and rest before exit."""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from functools import cache

_REST_S = 0.1
_thread = threading.local()


def stay_in_interpreter() -> None:
    """Keep the interpreter's thread state of a process group's thread; to be called from a completion callback.

    Python did not start that thread. It creates a thread state at each entry and drops it at each exit, twice per
    callback. On a core shared with training that took 0.1 ms of a step. The state is never freed.
    """
    if not hasattr(_thread, "keeps_state"):
        _thread.keeps_state = True
        ctypes.pythonapi.PyGILState_Ensure()


@cache
def rest_at_exit() -> None:
    """Make the process sleep for a moment before the interpreter exits; later calls do nothing.

    A process group's thread drops a work after `wait` has returned, together with its future's callbacks. It also drops
    the work's tensors if Python has released them meanwhile. Both need the interpreter. If the interpreter is exiting,
    the process is aborted. There is no signal that the thread has finished.
    """
    atexit.register(time.sleep, _REST_S)
