"""What is summed up at ingest: everything that one rank's own batch suffices for."""

from __future__ import annotations

from collections.abc import Iterator
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
    sums: dict[tuple[int, int, int], list[int]] = {}
    for rows, width in _alike(spans):
        ready, launched, done, *keys = (
            getattr(spans, name)[rows].reshape(-1, width)
            for name in ("ready_ns", "launched_ns", "done_ns", "module", "revision", "bucket")
        )
        pattern = np.stack([key[0] for key in keys])
        begins = np.flatnonzero(_changes(pattern[0]) | _changes(pattern[1])).tolist()
        for begin, end in zip(begins, [*begins[1:], width], strict=True):
            found = _grid_sums(ready[:, begin:end], launched[:, begin:end], done[:, begin:end])
            for key, row in zip(map(tuple, pattern[:, begin:end].T.tolist()), found.T.tolist(), strict=True):
                sums[key] = [*map(sum, zip(sums[key], row, strict=True))] if key in sums else row
    names = ("steps", "compute_ns", "comm_ns", "exposed_ns")
    return [
        {"module": module, "revision": revision, "bucket": bucket, **dict(zip(names, row, strict=True))}
        for (module, revision, bucket), row in sums.items()
    ]


def _grid_sums(ready: wire.Ints, launched: wire.Ints, done: wire.Ints) -> wire.Ints:
    """Steps, compute, communication and what is exposed of it, summed over the first axis, the steps."""
    compute = np.zeros_like(ready)
    np.subtract(ready[:, 1:], ready[:, :-1], out=compute[:, 1:])
    if compute.min() < 0:
        order = np.argsort(ready, axis=1, kind="stable")
        in_order = np.take_along_axis(ready, order, axis=1)
        np.put_along_axis(compute, order, np.diff(in_order, axis=1, prepend=in_order[:, :1]), axis=1)
    last_ready = ready.max(axis=1, keepdims=True)
    exposed = np.maximum(0, done - np.maximum(launched, last_ready))
    steps = np.full(ready.shape[1], len(ready))
    return np.stack([steps, compute.sum(axis=0), done.sum(axis=0) - launched.sum(axis=0), exposed.sum(axis=0)])


def _alike(spans: wire.Spans) -> Iterator[tuple[Any, int]]:
    """Rows of all steps that have the same buckets in the same order, and how many of them are a step's."""
    starts = np.flatnonzero(_changes(spans.step))
    widths = np.diff(starts, append=len(spans.step))
    for width in sorted(set(widths.tolist())):
        chosen, place = starts[widths == width], np.arange(width)
        rows: Any = slice(None) if len(chosen) == len(starts) else (chosen[:, None] + place).ravel()
        keys = [getattr(spans, name)[rows].reshape(-1, width) for name in ("module", "revision", "bucket")]
        if all((key == key[0]).all() for key in keys):
            yield rows, width
            continue
        patterns = np.unique(np.concatenate(keys, axis=1), axis=0, return_inverse=True)[1].ravel()
        for pattern in range(patterns.max() + 1):
            yield (chosen[patterns == pattern][:, None] + place).ravel(), width


def _changes(column: wire.Ints) -> Any:
    """True at the first row and where a row differs from the one before it."""
    changes = np.ones(len(column), bool)
    np.not_equal(column[1:], column[:-1], out=changes[1:])
    return changes


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
