"""What is summed up at ingest: everything that one rank's own batch suffices for."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddpobs import wire
from ddpobs_server.store.schema import ROLLUP_STEPS, STEP_BOUNDS_S

Row = dict[str, Any]


def step_windows(steps: wire.Steps) -> list[Row]:
    """Sums by window of `ROLLUP_STEPS` steps: wall time, phases, communication, samples, and known own time."""
    known = steps.own_ns != wire.UNKNOWN
    columns = {
        "steps": np.ones(len(steps.step), np.int64),
        "wall_ns": steps.end_ns - steps.start_ns,
        **{f"{phase}_ns": getattr(steps, f"{phase}_ns") for phase in wire.PHASES},
        "comm_ns": steps.comm_ns,
        "samples": steps.samples,
        "own_ns": np.where(known, steps.own_ns, 0),
        "own_steps": known.astype(np.int64),
    }
    windows, place = np.unique(steps.step // ROLLUP_STEPS, return_inverse=True)
    sums = {name: _sum_by(place, values, len(windows)) for name, values in columns.items()}
    return [
        {"step_window": int(window), **{name: int(values[index]) for name, values in sums.items()}}
        for index, window in enumerate(windows)
    ]


def step_durations(steps: wire.Steps) -> list[Row]:
    """How many steps fall under each bound of the histogram, not cumulated."""
    seconds = (steps.end_ns - steps.start_ns) / 1e9
    bounds, counts = np.unique(np.searchsorted(STEP_BOUNDS_S, seconds), return_counts=True)
    return [{"bound": int(bound), "steps": int(count)} for bound, count in zip(bounds, counts, strict=True)]


def bucket_sums(spans: wire.Spans) -> list[Row]:
    """Per bucket: compute span (previous bucket's readiness to its own), communication, and what is exposed of it.

    Exposed is what lies after the step's last readiness. A batch holds whole steps, so one batch suffices.
    """
    order = np.lexsort((spans.ready_ns, spans.revision, spans.module, spans.step))
    step, module, revision = spans.step[order], spans.module[order], spans.revision[order]
    ready, done = spans.ready_ns[order], spans.done_ns[order]
    first = np.ones(len(order), bool)
    first[1:] = (np.diff(step) != 0) | (np.diff(module) != 0) | (np.diff(revision) != 0)
    compute = np.where(first, 0, np.diff(ready, prepend=ready[:1]))
    group = np.cumsum(first) - 1
    last_ready = np.full(group[-1] + 1, np.iinfo(np.int64).min)
    np.maximum.at(last_ready, group, ready)
    launched = spans.launched_ns[order]
    exposed = np.maximum(0, done - np.maximum(launched, last_ready[group]))
    keys, place = np.unique(np.stack([module, revision, spans.bucket[order]]), axis=1, return_inverse=True)
    place = place.reshape(-1)
    sums = {
        "steps": np.bincount(place, minlength=keys.shape[1]),
        "compute_ns": _sum_by(place, compute, keys.shape[1]),
        "comm_ns": _sum_by(place, done - launched, keys.shape[1]),
        "exposed_ns": _sum_by(place, exposed, keys.shape[1]),
    }
    return [
        {
            "module": int(keys[0, index]),
            "revision": int(keys[1, index]),
            "bucket": int(keys[2, index]),
            **{name: int(values[index]) for name, values in sums.items()},
        }
        for index in range(keys.shape[1])
    ]


def peer_sums(peers: list[wire.Peers]) -> list[Row]:
    """Delay, waiting and straggler counts by rank."""
    names = ("delay_ns", "wait_ns", *(f"straggler_{phase}" for phase in wire.OWN_PHASES))
    rows: dict[int, Row] = {}
    for record in peers:
        for index, rank in enumerate(record.rank.tolist()):
            row = rows.setdefault(rank, {"rank": rank, "steps": 0, **dict.fromkeys(names, 0)})
            row["steps"] += record.steps
            for name in names:
                row[name] += int(getattr(record, name)[index])
    return list(rows.values())


def _sum_by(place: wire.Ints, values: wire.Ints, size: int) -> wire.Ints:
    sums = np.zeros(size, np.int64)
    np.add.at(sums, place, values)
    return sums
