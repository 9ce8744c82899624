"""Routes of columns: steps and bucket spans, with null for unknown values and a type for each column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Response
from typing_extensions import TypedDict

from ddpobs import wire
from ddpobs.wire.columns import Columns, Range
from ddpobs_server.api.concurrency import ConcurrencyLimitedRoute
from ddpobs_server.api.deps import ModuleQuery, RankQuery, RunDep, StepRangeDep, StoreDep
from ddpobs_server.api.fields import AttemptResponse, NextStep, doc
from ddpobs_server.api.openapi import attributes_of
from ddpobs_server.api.responses import columns_response
from ddpobs_server.reports.columns import RunColumns
from ddpobs_server.reports.timeline import RunTimeline

router = APIRouter(prefix="/api/v1", tags=["runs"], route_class=ConcurrencyLimitedRoute)

_PAGE_ROWS = 100_000
"""Approximate number of rows of columns in one response."""
_OWN, _OWN_PARTS = "own_ns", tuple(f"own_{phase}_ns" for phase in wire.OWN_PHASES)
_MEANS = {
    "ranks": "Number of ranks that the mean is over; only with `mean`.",
    "wall_ns": "Wall time of the step, in nanoseconds; only with `mean`.",
}
_RANK = "Number of the rank."
_BINS = {
    "rank": _RANK,
    "first": "First step of the bin; only with `points`.",
    "last": "Last step of the bin; only with `points`.",
    "steps": "Number of rows in the bin; only with `points`.",
    "began_ns": "Begin of the bin as Unix time, in nanoseconds; only with `points`.",
    "ended_ns": "End of the bin as Unix time, in nanoseconds; only with `points`.",
} | {
    f"{name}_{kind}_ns": f"{word} {time} of a step, in nanoseconds; only with `points`."
    for name, time in [("wall", "wall time"), *((phase, f"time in the phase {phase}") for phase in wire.PHASES)]
    for kind, word in {"min": "Minimum", "median": "Median", "max": "Maximum"}.items()
}
_BINS["waiting_median_ns"] = (
    "Median wait for later ranks in a step, a part of exposed communication, in nanoseconds; only with `points`."
)
_ALIGNED = {
    f"aligned_{name}_ns": f"{text} on the lowest rank's clock, in nanoseconds."
    for name, text in {"ready": "Readiness", "launched": "Hand-over", "done": "End"}.items()
}


def _described(texts: Mapping[str, str]) -> dict[str, Any]:
    """Columns of integers with their descriptions."""
    return {name: Annotated[list[int], doc(text)] for name, text in texts.items()}


def _columns_of(record: type[Columns]) -> dict[str, Any]:
    """Columns of a wire record: their descriptions are those of its docstring."""
    texts = attributes_of(record, unknown="null")
    return {
        name: Annotated[
            list[int | None] if _may_be_unknown(name, values) or name in _OWN_PARTS else list[int], doc(texts[name])
        ]
        for name, values in record.ranges.items()
    }


def _may_be_unknown(name: str, values: Range) -> bool:
    return values.least == wire.UNKNOWN or name == "started_ns"


StepColumns = TypedDict(  # type: ignore[misc]
    "StepColumns", _described(_BINS | _MEANS) | _columns_of(wire.Steps), total=False
)
"""Columns of one row per step and rank, per bin or per step, as `mean` and `points` select; others are left out."""

SpanColumns = TypedDict(  # type: ignore[misc]
    "SpanColumns", _described({"rank": _RANK}) | _columns_of(wire.Spans) | _described(_ALIGNED)
)
"""Columns of one row per bucket span."""


class StepPage(AttemptResponse):
    """Columns of one length; `next` is the next page's first step."""

    columns: Annotated[StepColumns, doc("Columns of one length, by name. Times end in `_ns` and are in nanoseconds.")]
    next: NextStep


class SpanPage(AttemptResponse):
    """Columns of one length; `next` is the next page's first step."""

    columns: Annotated[SpanColumns, doc("Columns of one length, by name. Times end in `_ns` and are in nanoseconds.")]
    next: NextStep


def with_null(columns: dict[str, wire.Ints], record: type[Columns]) -> dict[str, wire.Ints]:
    """Mask unknown values, so that JSON has null for them.

    Args:
        columns: Columns of the record by name, and other columns.
        record: Declares the values of its columns.
    """
    masks = {
        name: columns[name] == wire.UNKNOWN for name, values in record.ranges.items() if _may_be_unknown(name, values)
    }
    masks |= {name: masks[_OWN] for name in _OWN_PARTS if name in record.ranges}  # A difference may be -1.
    return columns | {name: np.ma.masked_array(columns[name], mask) for name, mask in masks.items() if mask.any()}


@router.get("/runs/{run}/steps", response_model=StepPage)
def get_steps(
    run: RunDep,
    steps: StepRangeDep,
    store: StoreDep,
    rank: RankQuery = None,
    mean: Annotated[bool, Query(description="Wall time and phases only, the mean over the ranks.")] = False,
    points: Annotated[int | None, Query(ge=1, le=10_000, description="Bins instead of steps, at most as many.")] = None,
) -> Response:
    """Steps in columns, sorted by step and rank; `next` is the first step that did not fit into this response.

    With `points` the run, or `from` to `to`, is divided into bins: minimum, median and maximum of the wall time and the
    phases of each rank. With `mean` too, the minimum, the mean of the medians and the maximum over the ranks. Bins of
    stored runs begin at multiples of 64 steps; `next` is set if ranks times bins are more than 25,000.
    """
    attempt, first, last = steps.attempt, steps.first, steps.last
    columns_of = RunColumns(store, run.run, attempt)
    if points is not None:
        bins = columns_of.step_bins((first, last), points, rank, mean=mean)
        return columns_response(run.name, attempt, *bins)
    if mean:
        return columns_response(run.name, attempt, *columns_of.mean_steps(first, last))
    end = store.page_end("steps", run.run, attempt, rank=rank, first=first, last=last, rows=_PAGE_ROWS)
    ranks, columns = store.steps(run.run, attempt, rank, first, last if end is None else end)
    next_step = None if end is None else end + 1
    return columns_response(run.name, attempt, with_null({"rank": ranks} | columns.by_name(), wire.Steps), next_step)


@router.get("/runs/{run}/spans", response_model=SpanPage)
def get_spans(
    run: RunDep,
    steps: StepRangeDep,
    store: StoreDep,
    rank: RankQuery = None,
    module: ModuleQuery = None,
) -> Response:
    """Bucket spans in columns, sorted by step and rank, also on one rank's clock (`aligned_…`); `next` as in steps."""
    attempt, first, last = steps.attempt, steps.first, steps.last
    # Aligning one rank's spans needs the other ranks' spans too, so the page is counted over all ranks.
    end = store.page_end("spans", run.run, attempt, first=first, last=last, rows=_PAGE_ROWS)
    columns = RunTimeline(store, run.run, attempt).aligned_spans(
        rank, first, last if end is None else end, module=module
    )
    return columns_response(run.name, attempt, with_null(columns, wire.Spans), None if end is None else end + 1)
