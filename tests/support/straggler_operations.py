"""A small file as StragglerAnalysis has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

STEPS = 6
SLOW_S = 0.3


def operations(slow: tuple[int, int]) -> list[dict[str, Any]]:
    """Steps of two stages and two replicas; the slow replica of a stage computes longer in backward."""
    rows = []
    for step in range(STEPS):
        for rank in range(4):
            replica, stage = divmod(rank, 2)
            late_s = SLOW_S if (replica, stage) == slow else 0.0
            place = {"rank": 4 * rank, "dp_rank": replica, "stage": stage, "step": 10 * step, "mb_id": 0}
            times = {
                "forward-recv" if stage else "backward-recv": (0.0 if stage else 0.2, 0.2),
                "forward-compute": (0.2 if stage else 0.0, 0.2),
                "backward-compute": (0.4, 0.2 + late_s),
                "grads-reduce-scatter": (0.6 + late_s, 0.1 + SLOW_S - late_s),
                "optimizer": (1.0, 0.1),
            }
            rows += [place | {"optype": kind, "start_ts": at, "duration": t} for kind, (at, t) in times.items()]
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path
