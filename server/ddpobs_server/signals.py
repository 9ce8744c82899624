"""Signal handlers that also work for process 1 of a container.

The kernel discards a signal to process 1 unless the process has a handler for it. The default action of SIGTERM or of
an alarm therefore never ends it. This module imports nothing slow: its handlers come before all other imports.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGINT)
"""Signals that end the collector."""


def install() -> None:
    """Let SIGTERM end the process at once, until a server replaces the handler. Python handles SIGINT itself."""
    signal.signal(signal.SIGTERM, end_at_once)


def end_at_once(number: int, _frame: FrameType | None) -> None:
    """End the process by the signal's default action, or as process 1 with the status that a shell reports for it."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def end_within(seconds: int) -> None:
    """Let each further signal end the process at once, and an alarm at the latest after some seconds."""
    for number in (*ENDING, signal.SIGALRM):
        signal.signal(number, end_at_once)
    signal.alarm(seconds)
