"""Waiting for what a training does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 40
"""For a full machine; `benchmarks/crashes.py` measures the time."""


def wait_for(condition: Callable[[], Any], logs: Callable[[], str] = str) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (result := condition()):
        assert time.monotonic() < deadline, logs()
        time.sleep(0.2)
    return result
