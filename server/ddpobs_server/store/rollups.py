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
    window = steps.step // ROLLUP_STEPS
    begins = np.flatnonzero(_changes(window))
    sums = np.add.reduceat(np.stack(list(columns.values())), begins, axis=1)
    # A window that comes twice in a batch gives two rows, which are added up like those of two batches.
    keys = window[begins].tolist()
    return [
        {"step_window": key, **dict(zip(columns, row, strict=True))}
        for key, row in zip(keys, sums.T.tolist(), strict=True)
    ]


def step_durations(steps: wire.Steps) -> list[Row]:
    """How many steps fall under each bound of the histogram, not cumulated."""
    seconds = (steps.end_ns - steps.start_ns) / 1e9
    counts = np.bincount(np.searchsorted(STEP_BOUNDS_S, seconds))
    return [{"bound": bound, "steps": count} for bound, count in enumerate(counts.tolist()) if count]


def bucket_sums(spans: wire.Spans) -> list[Row]:
    """Per bucket: compute span (previous bucket's readiness to its own), communication, and what is exposed of it.

    Exposed is what lies after the step's last readiness. A batch holds whole steps, and a module's spans of one
    together, so one batch suffices.
    """
    first = _changes(spans.step) | _changes(spans.module) | _changes(spans.revision)
    group = np.cumsum(first) - 1
    order = np.lexsort((spans.ready_ns, group))
    ready = spans.ready_ns[order]
    compute = np.empty_like(ready)
    compute[order] = np.where(first, 0, np.diff(ready, prepend=ready[:1]))
    last_ready = np.maximum.reduceat(ready, np.flatnonzero(first))[group]
    exposed = np.maximum(0, spans.done_ns - np.maximum(spans.launched_ns, last_ready))
    keys, place = _numbered(spans.module, spans.revision, spans.bucket)
    values = (np.ones_like(ready), compute, spans.done_ns - spans.launched_ns, exposed)
    sums = [_sum_by(place, column, len(keys)) for column in values]
    names = ("steps", "compute_ns", "comm_ns", "exposed_ns")
    return [
        {"module": module, "revision": revision, "bucket": bucket, **dict(zip(names, row, strict=True))}
        for (module, revision, bucket), row in zip(keys, np.stack(sums, axis=1).tolist(), strict=True)
    ]


def _changes(column: wire.Ints) -> Any:
    """True at the first row and where a row differs from the one before it."""
    changes = np.ones(len(column), bool)
    np.not_equal(column[1:], column[:-1], out=changes[1:])
    return changes


def _numbered(*columns: wire.Ints) -> tuple[list[tuple[int, ...]], wire.Ints]:
    """The different rows, and each row's place among them."""
    code = np.zeros(len(columns[0]), np.int64)
    values = []
    for column in columns:
        known: Any = column[:1]
        place: Any = 0
        if column.min() != column.max():
            known, place = np.unique(column, return_inverse=True)
        code = code * len(known) + place
        values.append(known)
    codes, place = np.unique(code, return_inverse=True)
    rows = []
    for one in codes.tolist():
        row, rest = [], one
        for known in reversed(values):
            rest, which = divmod(rest, len(known))
            row.append(int(known[which]))
        rows.append(tuple(reversed(row)))
    return rows, place


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
