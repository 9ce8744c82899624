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
    sums: dict[tuple[int, int, int], Any] = {}
    for block in _blocks(spans):
        shape = (-1, _width(block.step))
        ready, launched, done = (getattr(block, f"{name}_ns").reshape(shape) for name in ("ready", "launched", "done"))
        keys = np.stack([getattr(block, name)[: shape[1]] for name in ("module", "revision", "bucket")])
        begins = np.flatnonzero(_changes(keys[0]) | _changes(keys[1]))
        for begin, end in zip(begins, [*begins[1:], shape[1]], strict=True):
            found = _grid_sums(ready[:, begin:end], launched[:, begin:end], done[:, begin:end])
            for key, row in zip(map(tuple, keys[:, begin:end].T.tolist()), found.T, strict=True):
                sums[key] = sums[key] + row if key in sums else row
    names = ("steps", "compute_ns", "comm_ns", "exposed_ns")
    return [
        {"module": module, "revision": revision, "bucket": bucket, **dict(zip(names, row.tolist(), strict=True))}
        for (module, revision, bucket), row in sums.items()
    ]


def _grid_sums(ready: wire.Ints, launched: wire.Ints, done: wire.Ints) -> wire.Ints:
    """Steps, compute, communication and what is exposed of it, summed over the first axis, the steps."""
    compute = np.diff(ready, axis=1, prepend=ready[:, :1])
    if (compute < 0).any():
        order = np.argsort(ready, axis=1, kind="stable")
        in_order = np.take_along_axis(ready, order, axis=1)
        np.put_along_axis(compute, order, np.diff(in_order, axis=1, prepend=in_order[:, :1]), axis=1)
    last_ready = ready.max(axis=1, keepdims=True)
    exposed = np.maximum(0, done - np.maximum(launched, last_ready))
    steps = np.full(ready.shape[1], len(ready))
    return np.stack([steps, compute.sum(axis=0), (done - launched).sum(axis=0), exposed.sum(axis=0)])


def _blocks(spans: wire.Spans) -> Iterator[wire.Spans]:
    """Spans cut where a step has other buckets, or in another order, than the step before it."""
    starts = np.flatnonzero(_changes(spans.step))
    widths = np.diff(starts, append=len(spans.step))
    cuts = _changes(widths)
    for first, last in _runs(cuts):
        rows, width = slice(starts[first], starts[last - 1] + widths[first]), widths[first]
        keys = np.stack([getattr(spans, name)[rows].reshape(-1, width) for name in ("module", "revision", "bucket")])
        cuts[first + 1 : last] = (keys[:, 1:] != keys[:, :-1]).any(axis=(0, 2))
    for first, last in _runs(cuts):
        rows = slice(starts[first], starts[last - 1] + widths[first])
        yield wire.Spans(**{name: getattr(spans, name)[rows] for name in wire.Spans.__struct_fields__})


def _runs(begins: Any) -> list[tuple[int, int]]:
    """From each true value to the next, as [first, last)."""
    places = np.flatnonzero(begins).tolist()
    return list(zip(places, [*places[1:], len(begins)], strict=True))


def _width(step: wire.Ints) -> int:
    """Rows of the first step."""
    others = np.flatnonzero(step != step[0])
    return int(others[0]) if len(others) else len(step)


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
