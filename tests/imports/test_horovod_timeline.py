"""Timelines of Horovod whose numbers are too long to be numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpobs.errors import TraceFileError
from ddpobs.imports import horovod_timeline

_LONG = "9" * 5000


def test_long_numbers_are_cut(tmp_path: Path) -> None:
    start = {"name": "start_time_since_epoch_in_micros", "ph": "M", "args": {"micros": _LONG}}
    shape = {"name": "", "ph": "E", "pid": 1, "ts": 3, "args": {"dtype": "float32", "shape": f"[{_LONG}]"}}
    begun = [
        {"name": "NEGOTIATE_ALLREDUCE", "ph": "B", "pid": 1, "ts": 0},
        {"name": "0", "ph": "X", "pid": 1, "ts": 0},
        {"ph": "E", "pid": 1, "ts": 1},
        {"name": "ALLREDUCE", "ph": "B", "pid": 1, "ts": 2},
    ]
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps([start, *begun, shape]))
    with pytest.raises(TraceFileError, match="reductions of two ranks or more"):
        horovod_timeline.read(path)
