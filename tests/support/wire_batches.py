"""A batch with rows of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ddpobs import wire
from tests.support.columns import make_spans

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
"""A batch in each version of the wire."""


def spans(rows: int = 3, **changes: Any) -> wire.Spans:
    step = np.arange(rows)
    plain = {
        "step": step,
        "bucket": step % 2,
        "ready_ns": 10**15 + step * 1000,
        "launched_ns": 10**15 + step * 1000 + 5,
        "started_ns": wire.UNKNOWN,
        "done_ns": 10**15 + step * 1000 + 500,
    }
    return make_spans(**(plain | changes))


def batch(**changes: Any) -> wire.Batch:
    fields: dict[str, Any] = {
        "version": 1,
        "run": "run-1",
        "attempt": "a" * 16,
        "source": "0123456789abcdef",
        "seq": 0,
        "rank": 0,
        "world_size": 2,
        "emitted": 3,
        "dropped": 0,
        "anchor": wire.Anchor(wall_ns=10**18, monotonic_ns=10**15),
        "spans": spans(),
    }
    return wire.Batch(**(fields | changes))
