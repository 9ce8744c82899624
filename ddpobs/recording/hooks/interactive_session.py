"""Interrupts of an interactive session: a notebook's stop button, or Ctrl-C in a cell or at a prompt.

The KeyboardInterrupt ends the cell but not the process, which may train again. IPython handles the error itself, so its
event after each cell is used; Python's own prompt calls `sys.excepthook`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ddpobs.never_raises import never_raises


class InteractiveSession:
    """Reports an interrupted cell, while installed.

    Args:
        interrupted: Called on the session's thread after an interrupt.
    """

    def __init__(self, interrupted: Callable[[], object]) -> None:
        self._interrupted = never_raises(interrupted)
        self._events: Any = None

    def install(self) -> None:
        """Install the hook, if this process runs IPython."""
        with suppress(Exception):
            shell = sys.modules["IPython"].get_ipython()
            shell.events.register("post_run_cell", self._ran)
            self._events = shell.events

    def remove(self) -> None:
        """Remove the hook."""
        events, self._events = self._events, None
        if events is not None:
            with suppress(Exception):
                events.unregister("post_run_cell", self._ran)

    def failed(self, error: BaseException) -> None:
        """Look at an error that reached Python's own prompt."""
        if isinstance(error, KeyboardInterrupt):
            self._interrupted()

    def _ran(self, result: Any = None) -> None:
        if isinstance(getattr(result, "error_in_exec", None), KeyboardInterrupt):
            self._interrupted()
