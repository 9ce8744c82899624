"""Hooks on uncaught errors, which end a training.

The interpreter's exit may come long after the error, for example behind a thread of the user's. So the hooks report an
uncaught error at once.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from ddpobs.never_raises import never_raises
from ddpobs.torch_seam.patching import Patches


def uncaught() -> BaseException | None:
    """Return the uncaught error that ends a script; an interactive session continues after an error."""
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


def propagating() -> BaseException | None:
    """Return the error that ends a child process while it propagates.

    An exit code may report a caught error to the parent, as `torch.multiprocessing.spawn` does.
    """
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        return error.__context__ if error.code else None
    return error


class UncaughtErrors:
    """Hooks that report an uncaught error of the main thread or of the training thread, while installed.

    Args:
        trains_here: Whether the calling thread trains.
        report: Receives the error.
        at_prompt: Receives an error that returns an interactive session to its prompt.
    """

    def __init__(
        self,
        trains_here: Callable[[], bool],
        report: Callable[[BaseException], object],
        at_prompt: Callable[[BaseException], object] = lambda _: None,
    ) -> None:
        self._trains_here, self._report = trains_here, never_raises(report)
        self._at_prompt = at_prompt
        self._patches = Patches()

    def install(self) -> None:
        """Install the hooks; the hooks before them still run."""
        self._patches.put(sys, "excepthook", self._of_main_thread)
        self._patches.put(threading, "excepthook", self._of_thread)

    def remove(self) -> None:
        """Remove the hooks."""
        self._patches.undo()

    def _of_main_thread(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def excepthook(kind: Any, error: BaseException, *args: Any) -> Any:
            if hasattr(sys, "ps1"):
                self._at_prompt(error)
            else:
                self._report(error)
            return original(kind, error, *args)

        return excepthook

    def _of_thread(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def excepthook(args: Any) -> Any:
            if args.exc_value is not None and self._trains_here():
                self._report(args.exc_value)
            return original(args)

        return excepthook
