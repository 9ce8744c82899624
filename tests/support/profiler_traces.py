"""A small trace as torch.profiler writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def trace(folder: Path, name: str = "t.json", rank: int | None = 0, **fields: Any) -> Path:
    """Write a trace of two steps, each with a forward, a backward with one all-reduce, and an optimizer."""

    def one(category: str, name: str, begin: int, lasts: int, thread: int = 1) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": lasts, "tid": thread}

    events = []
    for number, at in enumerate((0, 10_000, 20_000)):
        events += [
            one("user_annotation", f"ProfilerStep#{5 + number}", at, 10_000),
            one("user_annotation", "enumerate(DataLoader)#_Iter.__next__", at, 1_000),
            one("user_annotation", "DistributedDataParallel.forward", at + 1_000, 2_000),
            one("cpu_op", "autograd::engine::evaluate_function: Mul", at + 3_000, 3_000),
            one("cpu_op", "c10d::allreduce_", at + 5_900, 50),
            one("user_annotation", "gloo:all_reduce", at + 6_000, 1_000, 2),
            one("user_annotation", "Optimizer.step#SGD.step", at + 8_000, 1_000),
        ]
    group = {} if rank is None else {"distributedInfo": {"backend": "gloo", "rank": rank, "world_size": 2}}
    path = folder / name
    path.write_text(json.dumps(group | {"traceEvents": events} | fields))
    return path
