"""Telemetry never stops a training: an error of its own is logged once, and not raised."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_log = logging.getLogger("ddpobs")
_P = ParamSpec("_P")
_T = TypeVar("_T")


def never_raises(call: Callable[_P, _T]) -> Callable[_P, _T | None]:
    """Decorate a call so that its first error is logged, and none is raised."""
    logged = False

    @wraps(call)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        nonlocal logged
        try:
            return call(*args, **kwargs)
        except Exception:
            if not logged:
                logged = True
                log_failure(call)
            return None

    return guarded


def goes_on_without(start: Callable[_P, _T]) -> Callable[_P, _T | None]:
    """Decorate a start of telemetry: if it fails, one line has the reason, and the training goes on without it."""

    @wraps(start)
    def started(*args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        try:
            return start(*args, **kwargs)
        except Exception as error:
            _log.warning("ddpobs: no telemetry: %s", str(error) or type(error).__name__)
            _log.debug("ddpobs: no telemetry", exc_info=True)
            return None

    return started


def log_failure(call: Callable[..., object]) -> None:
    """Log the error of that call, which is being handled."""
    _log.exception("ddpobs: telemetry failed in %s; training goes on", call.__qualname__)
