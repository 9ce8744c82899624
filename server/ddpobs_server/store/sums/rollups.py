"""Sums computed at ingest: everything that a rank's own batch suffices for.

Sums of buckets have two algorithms with the same result. General: `irregular_bucket_sums`; this file is the fast path
for steps with the same buckets in the same order, which form a grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from ddpobs import wire
from ddpobs.wire.columns import Columns
from ddpobs_server.store.schema import ROLLUP_STEPS, STEP_BOUNDS_S
from ddpobs_server.store.sums import irregular_bucket_sums
from ddpobs_server.store.sums.bucket_sums import add_tables, build_table
from ddpobs_server.store.sums.irregular_bucket_sums import BucketSums, changes

Sums = dict[str, list[int]]
"""Columns of sums by name; the column `batch` has the batch of each row."""
_C = TypeVar("_C", bound=Columns)
_IDENTITY = slice(wire.Spans.names.index("module"), wire.Spans.names.index("bucket") + 1)
"""Columns of spans that identify a bucket: module, revision and bucket."""
_MIN_ROWS = 64
"""Minimum number of rows per module in a grid. Fewer rows are faster to sort together with others."""
_READY, _LAUNCHED, _DONE, _WAITED = map(wire.Spans.names.index, ("ready_ns", "launched_ns", "done_ns", "waited_ns"))


def join(records: Sequence[_C]) -> tuple[_C, wire.Ints]:
    """Rows of several batches in sequence, and the batch of each row.

    Many batches take little longer to sum than a single batch: at their size a call costs more than the arithmetic.
    """
    return records[0].concat(records), np.repeat(np.arange(len(records)), [len(record) for record in records])


def step_windows(steps: wire.Steps, batch: wire.Ints) -> Sums:
    """Sums by batch and window of `ROLLUP_STEPS` steps: wall time, phases, communication, samples, known own time."""
    has_own = steps.own_ns != wire.UNKNOWN
    columns = {
        "steps": np.ones(len(steps.step), np.int64),
        "wall_ns": steps.end_ns - steps.start_ns,
        **{f"{phase}_ns": getattr(steps, f"{phase}_ns") for phase in wire.PHASES},
        "comm_ns": steps.comm_ns,
        "samples": steps.samples,
        "own_ns": np.where(has_own, steps.own_ns, 0),
        "own_steps": has_own.astype(np.int64),
    }
    window = steps.step // ROLLUP_STEPS
    begins = np.flatnonzero(changes(window) | changes(batch))
    sums = np.add.reduceat(np.stack(list(columns.values())), begins, axis=1)
    # A window that a batch enters twice gives two rows. The store adds them up, as it does for two batches.
    return _columns(("batch", "step_window", *columns), batch[begins], window[begins], *sums)


def step_durations(steps: wire.Steps, batch: wire.Ints) -> Sums:
    """Number of steps in each bin of the histogram, not cumulated, by batch."""
    bounds = len(STEP_BOUNDS_S) + 1
    bound = np.searchsorted(STEP_BOUNDS_S, (steps.end_ns - steps.start_ns) / 1e9)
    counts = np.bincount(batch * bounds + bound)
    filled = np.flatnonzero(counts)
    return _columns(("batch", "bound", "steps"), filled // bounds, filled % bounds, counts[filled])


def peer_sums(peers: Sequence[Sequence[wire.Peers]]) -> Sums:
    """Delay, waiting and straggler counts by batch and rank; a rank in two records of a batch has two rows."""
    names = ("delay_ns", "wait_ns", *(f"straggler_{phase}" for phase in wire.OWN_PHASES))
    records = [(batch, record) for batch, batch_records in enumerate(peers) for record in batch_records]
    sums: Sums = {name: [value for _, record in records for value in getattr(record, name).tolist()] for name in names}
    # Older clients send no `moving_ns`.
    moving_ns = [record.moving_ns if len(record.moving_ns) else 0 * record.rank for _, record in records]
    sums["moving_ns"] = [ns for of_record in moving_ns for ns in of_record.tolist()]
    sums["rank"] = [rank for _, record in records for rank in record.rank.tolist()]
    sums["batch"] = [batch for batch, record in records for _ in record.rank]
    sums["steps"] = [record.steps for _, record in records for _ in record.rank]
    return sums


def sum_buckets(spans: wire.Spans, batch: wire.Ints, steps: Sequence[wire.Steps | None]) -> BucketSums:
    """Compute, communication and exposed communication of each bucket, by batch, module and revision.

    Compute lasts from the previous bucket's readiness to its own. Communication is exposed after the last readiness of
    all modules that share a backward, because a module's backward hides the communication of another. A batch holds
    whole steps, and a step's spans of a module are adjacent, so a single batch suffices.

    Args:
        spans: Spans of some batches.
        batch: Batch of each span.
        steps: Steps of each batch.
    """
    if not len(spans):
        return {}
    begins = changes(spans.step)
    if batch[-1]:  # A batch may end with the step with which the next begins.
        begins |= changes(batch)
    grids, irregular = _split_grids(spans, np.flatnonzero(begins))
    parts = [_sum_grid(spans.select(rows), batch[rows], width, steps) for rows, width in grids]
    if irregular is not None:
        multiple = _several_backwards(steps)
        step = np.cumsum(begins)[irregular]
        parts.append(irregular_bucket_sums.sums(spans.select(irregular), batch[irregular], step, multiple))
    result = parts[0]
    for part in parts[1:]:
        for key, table in part.items():
            result[key] = add_tables(result[key], table) if key in result else table
    return result


def _sum_grid(spans: wire.Spans, batch: wire.Ints, width: int, steps: Sequence[wire.Steps | None]) -> BucketSums:
    """Sums of steps that each have the same `width` buckets in the same order."""
    result: BucketSums = {}
    grids = spans.table.reshape(len(spans.names), -1, width)
    identity = grids[_IDENTITY, 0]
    ready, launched, done, waited = (grids[row] for row in (_READY, _LAUNCHED, _DONE, _WAITED))
    step_batch = batch[::width]
    first = np.flatnonzero(changes(step_batch))
    begins = _module_begins(identity)
    modules = list(zip(begins, [*begins[1:], width], strict=True))
    computes, lasts = zip(*(_compute(ready[:, begin:end]) for begin, end in modules), strict=True)
    if len(modules) > 1:
        firsts = np.stack([ready[:, begin:end].min(axis=1) for begin, end in modules])
        dones = np.stack([done[:, begin:end].max(axis=1) for begin, end in modules])
        lasts = tuple(_last_of_backward(firsts, np.stack(lasts), dones, _several_backwards(steps)[step_batch]))
    for compute, last_ready, (begin, end) in zip(computes, lasts, modules, strict=True):
        module, revision, bucket = identity[:, begin:end]
        times = launched[:, begin:end], done[:, begin:end], waited[:, begin:end]
        sums = _grid_sums(compute, times, last_ready, first)
        for index, batch_index in enumerate(step_batch[first].tolist()):
            key, table = (batch_index, int(module[0]), int(revision[0])), build_table(bucket, sums[:, index])
            result[key] = add_tables(result[key], table) if key in result else table
    return result


def _compute(ready: wire.Ints) -> tuple[wire.Ints, wire.Ints]:
    """Time from the previous bucket's readiness to each bucket's own, and each step's last readiness."""
    flat = ready.ravel()
    compute = np.empty(ready.shape, np.int64)
    np.subtract(flat[1:], flat[:-1], out=compute.reshape(-1)[1:])
    compute[:, 0] = 0
    last_ready = ready[:, -1]
    if compute.min() < 0:
        order = np.argsort(ready, axis=1, kind="stable")
        in_order = np.take_along_axis(ready, order, axis=1)
        np.put_along_axis(compute, order, np.diff(in_order, axis=1, prepend=in_order[:, :1]), axis=1)
        last_ready = in_order[:, -1]
    return compute, last_ready


def _last_of_backward(first: wire.Ints, last: wire.Ints, done: wire.Ints, multiple: Any) -> wire.Ints:
    """`irregular_bucket_sums.last_of_backward` for arrays of shape [modules, steps]; `multiple` has shape [steps]."""
    if not multiple.any():
        return np.broadcast_to(last.max(axis=0), last.shape)
    step, multiple = (np.tile(values, len(last)) for values in (np.arange(len(multiple)), multiple))
    result = irregular_bucket_sums.last_of_backward(step, first.ravel(), last.ravel(), done.ravel(), multiple)
    return result.reshape(last.shape)


def _several_backwards(steps: Sequence[wire.Steps | None]) -> Any:
    """Whether a step of each batch may have several backwards, as a GAN's steps do.

    Collective numbers that advance by more than 1 a step show it. With fewer than two numbers it stays possible.
    """

    def may_have_several(batch_steps: wire.Steps | None) -> bool:
        numbers = batch_steps.collective[batch_steps.collective >= 0] if batch_steps is not None else ()
        return len(numbers) < 2 or bool(np.diff(numbers).max() > 1)

    return np.array([may_have_several(batch_steps) for batch_steps in steps])


def _grid_sums(
    compute: wire.Ints, times: tuple[wire.Ints, wire.Ints, wire.Ints], last_ready: wire.Ints, first: wire.Ints
) -> wire.Ints:
    """`bucket_sums.SUMS` from each first step up to the next; shape [sums, first steps, buckets].

    Args:
        compute: Computation of each bucket, shape [steps, buckets].
        times: Launch, completion, and wait of training, same shape; a wait of `UNKNOWN` begins at the last readiness.
        last_ready: Shape [steps].
        first: Steps.
    """
    steps, width = compute.shape
    launched, done, waited = (column.ravel() for column in times)
    exposed = np.repeat(last_ready, width)
    np.maximum(launched, exposed, out=exposed)
    np.subtract(done, exposed, out=exposed)
    np.maximum(exposed, 0, out=exposed)
    np.copyto(exposed, waited, where=waited >= 0)
    grids = (compute, (done - launched).reshape(compute.shape), exposed.reshape(compute.shape))
    counts = np.repeat(np.diff(first, append=steps), width).reshape(-1, width)
    return np.stack([counts, *(np.add.reduceat(grid, first) for grid in grids)])


def _split_grids(spans: wire.Spans, starts: wire.Ints) -> tuple[list[tuple[Any, int]], Any]:
    """Split spans into grids and irregular rows. A grid has steps with the same buckets in the same order.

    Args:
        spans: Not empty.
        starts: First row of each step.

    Returns:
        Rows and width (buckets per step) of each grid that has enough rows to gain from it; and all other rows, None
        if there are none.
    """
    identity, width = spans.table[_IDENTITY], len(spans) // len(starts)
    if np.array_equal(starts, np.arange(0, len(spans), width)) and (identity[:, width:] == identity[:, :-width]).all():
        return ([(slice(None), width)], None) if _pays(identity[:, :width], len(starts)) else ([], slice(None))
    grids, irregular = [], np.ones(len(spans), bool)
    widths = np.diff(starts, append=len(spans))
    for width in sorted(set(widths.tolist())):
        step_starts, offset = starts[widths == width], np.arange(width)
        keys = np.ascontiguousarray(identity[:, step_starts[:, None] + offset].swapaxes(0, 1))
        keys = keys.reshape(len(step_starts), -1)
        _, example, pattern, counts = np.unique(
            keys.view(f"V{keys.strides[0]}").ravel(), return_index=True, return_inverse=True, return_counts=True
        )
        for index in np.flatnonzero(counts * width >= _MIN_ROWS).tolist():
            if _pays(identity[:, step_starts[example[index]] + offset], int(counts[index])):
                rows = (step_starts[pattern == index][:, None] + offset).ravel()
                grids.append((rows, width))
                irregular[rows] = False
    return grids, np.flatnonzero(irregular) if irregular.any() else None


def _pays(identity: wire.Ints, steps: int) -> bool:
    """Whether `steps` steps with these buckets have enough rows to outweigh the work for each module."""
    return bool(identity.shape[1] * steps >= _MIN_ROWS * len(_module_begins(identity)))


def _module_begins(identity: wire.Ints) -> list[int]:
    """First span of each module in a step."""
    return np.flatnonzero(changes(identity[0]) | changes(identity[1])).tolist()


def _columns(names: Sequence[str], *columns: wire.Ints) -> Sums:
    return {name: column.tolist() for name, column in zip(names, columns, strict=True)}
