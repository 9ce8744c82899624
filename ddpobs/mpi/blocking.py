"""A line in the log for a call of MPI's that blocks for long: no timeout of torch's ends it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

_log = logging.getLogger("ddpobs")
_LONG_S = 60.0


@contextmanager
def logged_if_long(call: str, after_s: float = _LONG_S) -> Iterator[None]:
    """Log a warning if the block takes longer; such a call takes a whole processor while it waits.

    Args:
        call: The function of MPI's.
        after_s: Time after which it is long.
    """
    message = "ddpobs: this rank has waited %.0f s in %s for the other ranks; see their stacks with `ddpobs stacks`"
    timer = Timer(after_s, lambda: _log.warning(message, after_s, call))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
