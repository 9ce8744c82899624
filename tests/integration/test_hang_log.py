"""Runs that hang by real means, without a collector: the sentence in a surviving rank's log."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.faults.launch import HANGING, Ranks, ranks_of

ABSENT = "http://127.0.0.1:9"
"""No collector listens there."""
LIMIT_S = 60
"""For a full machine; `benchmarks/hangs.py` measures the time."""
CASES = {
    "loader": "Rank 1 has been in the data loader for * s (*hanging.py:* __getitem__). {others} in bucket",
    "fewer-batches": "Rank 1 has been in its own code for * s (hanging.py:* → hanging.py:* main). {others} in",
    "lock": "Rank 1 has been in its own code for * s (hanging.py:* → hanging.py:* wait_for_a_lock). {others} in",
    "stop": "The process of rank 1 is stopped (last in * of step *). {others} in",
    "all-in-data": "No rank gets a batch. {all} have been in the data loader for * s (*__getitem__)",
}
"""Cases and their sentences, in which a star stands for any text."""
