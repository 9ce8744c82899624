"""Warnings that are logged once."""

from __future__ import annotations

import logging

_log = logging.getLogger("ddpobs")


class Once:
    """Warnings, each logged once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def __call__(self, key: str, message: str, *facts: object, trace: bool = False) -> None:
        """Log a warning unless its key was used before; `trace` adds the current exception."""
        if key not in self._logged:
            self._logged.add(key)
            _log.warning("ddpobs: " + message, *facts, exc_info=trace)
