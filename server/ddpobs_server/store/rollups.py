"""What is summed up at ingest: everything that one rank's own batch suffices for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from ddpobs import wire
from ddpobs.wire.columns import Columns
from ddpobs_server.store import buckets
from ddpobs_server.store.schema import ROLLUP_STEPS, STEP_BOUNDS_S

Sums = dict[str, list[int]]
"""Columns of sums by name; the column `batch` tells which batch each row is of."""
_C = TypeVar("_C", bound=Columns)
_OWN = slice(wire.Spans.names.index("module"), wire.Spans.names.index("bucket") + 1)
"""The columns of spans that tell which bucket a span is of: module, revision and bucket."""
_READY, _LAUNCHED, _DONE = map(wire.Spans.names.index, ("ready_ns", "launched_ns", "done_ns"))


def join(records: Sequence[_C]) -> tuple[_C, wire.Ints]:
    """The rows of several batches one after the other, and for each row which batch it is of.

    To sum many batches at once takes little longer than one: at their size a call costs more than the arithmetic.
    """
    return records[0].joined(records), np.repeat(np.arange(len(records)), [len(record) for record in records])


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
    begins = np.flatnonzero(_changes(window) | _changes(batch))
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


def bucket_sums(
    spans: wire.Spans, batch: wire.Ints, steps: Sequence[wire.Steps | None]
) -> dict[tuple[int, int, int], buckets.Table]:
    """By batch, module and revision: compute (previous bucket's readiness to its own), communication, what is exposed.

    Exposed is what lies after the last readiness of the modules that have one backward: a part of it hides the
    communication of another. A batch holds whole steps, and a module's spans of one together, so one batch suffices.

    Args:
        spans: Of some batches.
        batch: Which one each span is of.
        steps: Each batch's.
    """
    found: dict[tuple[int, int, int], buckets.Table] = {}
    for rows, width in _alike(spans, batch):
        grids = spans.at(rows).table.reshape(len(spans.names), -1, width)
        own, ready, launched, done = grids[_OWN, 0], grids[_READY], grids[_LAUNCHED], grids[_DONE]
        of = batch[rows][::width]
        first = np.flatnonzero(_changes(of))
        begins = np.flatnonzero(_changes(own[0]) | _changes(own[1])).tolist()
        modules = list(zip(begins, [*begins[1:], width], strict=True))
        computes, lasts = zip(*(_compute(ready[:, begin:end]) for begin, end in modules), strict=True)
        if len(modules) > 1:
            firsts = [ready[:, begin:end].min(axis=1) for begin, end in modules]
            dones = [done[:, begin:end].max(axis=1) for begin, end in modules]
            several = np.array([_several_backwards(steps[one]) for one in range(of[-1] + 1)])[of]
            lasts = tuple(_last_of_backward(np.stack(firsts), np.stack(lasts), np.stack(dones), several))
        for compute, last_ready, (begin, end) in zip(computes, lasts, modules, strict=True):
            module, revision, bucket = own[:, begin:end]
            sums = _grid_sums(compute, launched[:, begin:end], done[:, begin:end], last_ready, first)
            for place, one in enumerate(of[first].tolist()):
                key, table = (one, int(module[0]), int(revision[0])), buckets.table(bucket, sums[:, place])
                found[key] = buckets.added(found[key], table) if key in found else table
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


def _several_backwards(steps: wire.Steps | None) -> bool:
    """Whether a step may have several, as a GAN's: their sequence numbers tell, where there are two steps."""
    numbers = steps.collective[steps.collective >= 0] if steps is not None else ()
    return len(numbers) < 2 or bool(np.diff(numbers).max() > 1)


def _last_of_backward(first: wire.Ints, last: wire.Ints, done: wire.Ints, several: Any) -> wire.Ints:
    """When the last gradient came of the backward that each module is reduced in, shape [modules, steps].

    Args:
        first: Each module's first readiness, shape [modules, steps].
        last: Its last one.
        done: When its last bucket was done.
        several: In which steps there may be several: one begins with a module that begins when all before it are done.
    """
    order = np.argsort(first, axis=0)
    first, together, done = (np.take_along_axis(times, order, axis=0) for times in (first, last, done))
    apart = several & (first[1:] >= np.maximum.accumulate(done, axis=0)[:-1])
    for place in reversed(range(len(apart))):
        latest = np.maximum(together[place], together[place + 1])
        together[place] = np.where(apart[place], together[place], latest)
    for place, new in enumerate(apart):
        together[place + 1] = np.where(new, together[place + 1], together[place])
    found = np.empty_like(together)
    np.put_along_axis(found, order, together, axis=0)
    return found


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


def _alike(spans: wire.Spans, batch: wire.Ints) -> Iterator[tuple[Any, int]]:
    """Rows of all steps that have the same buckets in the same order, and how many of them are a step's."""
    if not len(spans):
        return
    begins = _changes(spans.step)
    if batch[-1]:  # Of several batches one may end with the step that the next begins with.
        begins |= _changes(batch)
    starts, own = np.flatnonzero(begins), spans.table[_OWN]
    width = len(spans) // len(starts)
    if np.array_equal(starts, np.arange(0, len(spans), width)) and (own[:, width:] == own[:, :-width]).all():
        yield slice(None), width
        return
    widths = np.diff(starts, append=len(spans))
    for width in sorted(set(widths.tolist())):
        chosen, place = starts[widths == width], np.arange(width)
        keys = own[:, chosen[:, None] + place].swapaxes(0, 1).reshape(len(chosen), -1)
        patterns = np.unique(keys, axis=0, return_inverse=True)[1].ravel()
        for pattern in range(patterns.max() + 1):
            yield (chosen[patterns == pattern][:, None] + place).ravel(), width


def _sums(names: Sequence[str], *columns: wire.Ints) -> Sums:
    return {name: column.tolist() for name, column in zip(names, columns, strict=True)}


def _changes(column: wire.Ints) -> Any:
    """True at the first row and where a row differs from the one before it."""
    changes = np.ones(len(column), bool)
    np.not_equal(column[1:], column[:-1], out=changes[1:])
    return changes


def peer_sums(peers: Sequence[Sequence[wire.Peers]]) -> Sums:
    """Delay, waiting and straggler counts of each batch by rank; a rank that is told of twice has two rows."""
    names = ("delay_ns", "wait_ns", *(f"straggler_{phase}" for phase in wire.OWN_PHASES))
    told = [(batch, record) for batch, records in enumerate(peers) for record in records]
    sums: Sums = {name: [value for _, record in told for value in getattr(record, name).tolist()] for name in names}
    sums["rank"] = [rank for _, record in told for rank in record.rank.tolist()]
    for name, values in (("batch", [batch for batch, _ in told]), ("steps", [record.steps for _, record in told])):
        sums[name] = [value for value, (_, record) in zip(values, told, strict=True) for _ in record.rank]
    return sums
