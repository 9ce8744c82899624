"""Process-group threads and the interpreter: keep their state, and rest before exit."""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from functools import cache

_REST_S = 0.1


_thread = threading.local()


def stay_in_interpreter() -> None:
    """Keep the interpreter's state of a process group's thread, which calls this from a completion's callback.

    Python knows nothing of such a thread: it makes it a state whenever it comes in, and drops it when it leaves, twice
    a callback. That took 0.1 ms of a step, where training wants the same core. What is kept goes with the process.
    """
    if not hasattr(_thread, "stays"):
        _thread.stays = True
        ctypes.pythonapi.PyGILState_Ensure()


@cache
def rest_at_exit() -> None:
    """Have the process rest for a moment before the interpreter ends; once is enough.

    A thread of the process group's drops a work after `wait` has returned: the callbacks of its future with it, and its
    tensors where Python let go of them meanwhile. Both want the interpreter, and where that is ending the process is
    aborted. Nobody tells when the thread is done.
    """
    atexit.register(time.sleep, _REST_S)
