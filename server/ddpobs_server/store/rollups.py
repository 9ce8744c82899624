"""What is summed up at ingest: everything that one rank's own batch suffices for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from ddpobs import wire
from ddpobs.wire.columns import Columns
from ddpobs_server.store import irregular_bucket_sums
from ddpobs_server.store.bucket_sums import added
from ddpobs_server.store.bucket_sums import table as table_of
from ddpobs_server.store.irregular_bucket_sums import BucketSums, changes
from ddpobs_server.store.schema import ROLLUP_STEPS, STEP_BOUNDS_S

Sums = dict[str, list[int]]
"""Columns of sums by name; the column `batch` tells which batch each row is of."""
_C = TypeVar("_C", bound=Columns)
_OWN = slice(wire.Spans.names.index("module"), wire.Spans.names.index("bucket") + 1)
"""The columns of spans that tell which bucket a span is of: module, revision and bucket."""
_LEAST_ROWS = 64
"""Of a module in steps that are alike: with fewer it is quicker to sort them together with others."""
_READY, _LAUNCHED, _DONE = map(wire.Spans.names.index, ("ready_ns", "launched_ns", "done_ns"))


def join(records: Sequence[_C]) -> tuple[_C, wire.Ints]:
    """The rows of several batches one after the other, and for each row which batch it is of.

    To sum many batches at once takes little longer than one: at their size a call costs more than the arithmetic.
    """
    return records[0].concat(records), np.repeat(np.arange(len(records)), [len(record) for record in records])


def step_windows(steps: wire.Steps, batch: wire.Ints) -> Sums:
    """Sums by batch and window of `ROLLUP_STEPS` steps: wall time, phases, communication, samples, known own time."""
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
    begins = np.flatnonzero(changes(window) | changes(batch))
    sums = np.add.reduceat(np.stack(list(columns.values())), begins, axis=1)
    # A window that comes twice in a batch gives two rows, which are added up like those of two batches.
    return _sums(("batch", "step_window", *columns), batch[begins], window[begins], *sums)


def step_durations(steps: wire.Steps, batch: wire.Ints) -> Sums:
    """How many steps of each batch fall under each bound of the histogram, not cumulated."""
    bounds = len(STEP_BOUNDS_S) + 1
    bound = np.searchsorted(STEP_BOUNDS_S, (steps.end_ns - steps.start_ns) / 1e9)
    counts = np.bincount(batch * bounds + bound)
    found = np.flatnonzero(counts)
    return _sums(("batch", "bound", "steps"), found // bounds, found % bounds, counts[found])


def bucket_sums(spans: wire.Spans, batch: wire.Ints, steps: Sequence[wire.Steps | None]) -> BucketSums:
    """By batch, module and revision: compute (previous bucket's readiness to its own), communication, what is exposed.

    Exposed is what lies after the last readiness of the modules that have one backward: a part of it hides the
    communication of another. A batch holds whole steps, and a module's spans of one together, so one batch suffices.

    Args:
        spans: Of some batches.
        batch: Which one each span is of.
        steps: Each batch's.
    """
    if not len(spans):
        return {}
    begins = changes(spans.step)
    if batch[-1]:  # Of several batches one may end with the step that the next begins with.
        begins |= changes(batch)
    grids, rest = _alike(spans, np.flatnonzero(begins))
    parts = [_alike_sums(spans.select(rows), batch[rows], width, steps) for rows, width in grids]
    if rest is not None:
        several = _several_backwards(steps)
        parts.append(irregular_bucket_sums.sums(spans.select(rest), batch[rest], np.cumsum(begins)[rest], several))
    found = parts[0]
    for part in parts[1:]:
        for key, table in part.items():
            found[key] = added(found[key], table) if key in found else table
    return found


def _alike_sums(spans: wire.Spans, batch: wire.Ints, width: int, steps: Sequence[wire.Steps | None]) -> BucketSums:
    """Of steps that have the same so many buckets in the same order."""
    found: BucketSums = {}
    grids = spans.table.reshape(len(spans.names), -1, width)
    own, ready, launched, done = grids[_OWN, 0], grids[_READY], grids[_LAUNCHED], grids[_DONE]
    of = batch[::width]
    first = np.flatnonzero(changes(of))
    begins = _modules(own)
    modules = list(zip(begins, [*begins[1:], width], strict=True))
    computes, lasts = zip(*(_compute(ready[:, begin:end]) for begin, end in modules), strict=True)
    if len(modules) > 1:
        firsts = np.stack([ready[:, begin:end].min(axis=1) for begin, end in modules])
        dones = np.stack([done[:, begin:end].max(axis=1) for begin, end in modules])
        lasts = tuple(_last_of_backward(firsts, np.stack(lasts), dones, _several_backwards(steps)[of]))
    for compute, last_ready, (begin, end) in zip(computes, lasts, modules, strict=True):
        module, revision, bucket = own[:, begin:end]
        sums = _grid_sums(compute, launched[:, begin:end], done[:, begin:end], last_ready, first)
        for place, one in enumerate(of[first].tolist()):
            key, table = (one, int(module[0]), int(revision[0])), table_of(bucket, sums[:, place])
            found[key] = added(found[key], table) if key in found else table
    return found


def _compute(ready: wire.Ints) -> tuple[wire.Ints, wire.Ints]:
    """From the previous bucket's readiness to each one's own, and each step's last readiness."""
    plain = ready.ravel()
    compute = np.empty(ready.shape, np.int64)
    np.subtract(plain[1:], plain[:-1], out=compute.reshape(-1)[1:])
    compute[:, 0] = 0
    last_ready = ready[:, -1]
    if compute.min() < 0:
        order = np.argsort(ready, axis=1, kind="stable")
        in_order = np.take_along_axis(ready, order, axis=1)
        np.put_along_axis(compute, order, np.diff(in_order, axis=1, prepend=in_order[:, :1]), axis=1)
        last_ready = in_order[:, -1]
    return compute, last_ready


def _last_of_backward(first: wire.Ints, last: wire.Ints, done: wire.Ints, several: Any) -> wire.Ints:
    """`unlike.last_of_backward`, of arrays of shape [modules, steps]; `several` has shape [steps]."""
    if not several.any():
        return np.broadcast_to(last.max(axis=0), last.shape)
    step, several = (np.tile(of_steps, len(last)) for of_steps in (np.arange(len(several)), several))
    found = irregular_bucket_sums.last_of_backward(step, first.ravel(), last.ravel(), done.ravel(), several)
    return found.reshape(last.shape)


def _several_backwards(steps: Sequence[wire.Steps | None]) -> Any:
    """Of each batch, whether a step may have several, as a GAN's: sequence numbers tell, where there are two steps."""

    def may(told: wire.Steps | None) -> bool:
        numbers = told.collective[told.collective >= 0] if told is not None else ()
        return len(numbers) < 2 or bool(np.diff(numbers).max() > 1)

    return np.array([may(told) for told in steps])


def _grid_sums(
    compute: wire.Ints, launched: wire.Ints, done: wire.Ints, last_ready: wire.Ints, first: wire.Ints
) -> wire.Ints:
    """`buckets.SUMS`, from each first step to the next; shape [sums, first steps, buckets]."""
    steps, width = compute.shape
    launched, done = launched.ravel(), done.ravel()
    exposed = np.repeat(last_ready, width)
    np.maximum(launched, exposed, out=exposed)
    np.subtract(done, exposed, out=exposed)
    np.maximum(exposed, 0, out=exposed)
    grids = (compute, (done - launched).reshape(compute.shape), exposed.reshape(compute.shape))
    counts = np.repeat(np.diff(first, append=steps), width).reshape(-1, width)
    return np.stack([counts, *(np.add.reduceat(grid, first) for grid in grids)])


def _alike(spans: wire.Spans, starts: wire.Ints) -> tuple[list[tuple[Any, int]], Any]:
    """Steps that have the same buckets in the same order, together.

    Args:
        spans: Not empty.
        starts: The first row of each step.

    Returns:
        Rows of such steps, and how many of them are a step's, where there are enough to be looked at for themselves;
        and all other rows, None where there are none.
    """
    own, width = spans.table[_OWN], len(spans) // len(starts)
    if np.array_equal(starts, np.arange(0, len(spans), width)) and (own[:, width:] == own[:, :-width]).all():
        return ([(slice(None), width)], None) if _worthwhile(own[:, :width], len(starts)) else ([], slice(None))
    grids, rest = [], np.ones(len(spans), bool)
    widths = np.diff(starts, append=len(spans))
    for width in sorted(set(widths.tolist())):
        chosen, place = starts[widths == width], np.arange(width)
        keys = np.ascontiguousarray(own[:, chosen[:, None] + place].swapaxes(0, 1)).reshape(len(chosen), -1)
        _, one, patterns, counts = np.unique(
            keys.view(f"V{keys.strides[0]}").ravel(), return_index=True, return_inverse=True, return_counts=True
        )
        for pattern in np.flatnonzero(counts * width >= _LEAST_ROWS).tolist():
            if _worthwhile(own[:, chosen[one[pattern]] + place], int(counts[pattern])):
                rows = (chosen[patterns == pattern][:, None] + place).ravel()
                grids.append((rows, width))
                rest[rows] = False
    return grids, np.flatnonzero(rest) if rest.any() else None


def _worthwhile(own: wire.Ints, steps: int) -> bool:
    """Whether so many steps with these buckets are so many rows that what is done for each module is little."""
    return bool(own.shape[1] * steps >= _LEAST_ROWS * len(_modules(own)))


def _modules(own: wire.Ints) -> list[int]:
    """Where in a step the spans of each module begin."""
    return np.flatnonzero(changes(own[0]) | changes(own[1])).tolist()


def _sums(names: Sequence[str], *columns: wire.Ints) -> Sums:
    return {name: column.tolist() for name, column in zip(names, columns, strict=True)}


def peer_sums(peers: Sequence[Sequence[wire.Peers]]) -> Sums:
    """Delay, waiting and straggler counts of each batch by rank; a rank that is told of twice has two rows."""
    names = ("delay_ns", "wait_ns", *(f"straggler_{phase}" for phase in wire.OWN_PHASES))
    told = [(batch, record) for batch, records in enumerate(peers) for record in records]
    sums: Sums = {name: [value for _, record in told for value in getattr(record, name).tolist()] for name in names}
    sums["rank"] = [rank for _, record in told for rank in record.rank.tolist()]
    for name, values in (("batch", [batch for batch, _ in told]), ("steps", [record.steps for _, record in told])):
        sums[name] = [value for value, (_, record) in zip(values, told, strict=True) for _ in record.rank]
    return sums
