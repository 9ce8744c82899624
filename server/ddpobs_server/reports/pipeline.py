"""The stages of a run's pipeline: computation, bubbles and overlap of the all-reduce, over the latest steps."""

from __future__ import annotations

from typing import Any

from ddpobs_server.analysis.steps.pipeline import (
    RankColumns,
    Reduction,
    Stage,
    expected_bubble,
    pipeline_json,
    reduction,
    stage_times,
    stages_of,
)
from ddpobs_server.reports.recent_steps import read_recent_steps
from ddpobs_server.store import Source, Store, TooManyRowsError

_REDUCTION_STEPS, _REDUCTION_RANKS = 50, 4
"""Latest steps, and replicas of a stage, whose spans are read."""
_NO_SCHEDULE = "no rank has reported a schedule of torch.distributed.pipelining, or not every stage has"
_NO_STEPS = "a stage has no step of a schedule with a clean start yet"


def pipeline_response(store: Store, run: str, attempt: str) -> dict[str, Any]:
    """Return the pipeline of an attempt; null, and the reason, if it cannot be shown."""
    stages = stages_of(store.first_events(run, attempt))
    if not stages:
        return _without(run, attempt, _NO_SCHEDULE)
    sources = store.sources(run, attempt)
    times = stage_times(stages, *read_recent_steps(store, run, attempt, sources))
    if not times:
        return _without(run, attempt, _NO_STEPS)
    reductions, missing = _reductions(store, run, attempt, sources, stages)
    pipeline = pipeline_json(times, reductions, expected_bubble(stages))
    return {"run": run, "attempt": attempt, "pipeline": pipeline, "missing": missing}


def _reductions(
    store: Store, run: str, attempt: str, sources: list[Source], stages: list[Stage]
) -> tuple[list[Reduction | None], list[str]]:
    of_rank = {source.rank: source for source in sources}
    reductions: list[Reduction | None] = []
    missing: list[str] = []
    for stage in stages:
        columns = []
        for rank in stage.ranks[:_REDUCTION_RANKS]:
            try:
                columns.append(_columns(store, run, attempt, of_rank[rank]))
            except TooManyRowsError as error:
                missing.append(f"overlap of {stage.name}: {error}")
        reductions.append(reduction(stage, columns))
    return reductions, missing


def _columns(store: Store, run: str, attempt: str, source: Source) -> RankColumns:
    first, last = max(0, source.last_step - _REDUCTION_STEPS + 1), source.last_step
    return RankColumns(
        store.steps(run, attempt, source.rank, first, last)[1],
        store.spans(run, attempt, [source.rank], first, last)[1],
        store.comms(run, attempt, source.rank, first, last)[1],
        source.hello is not None and source.hello.settings.get("reducer") == "torch",
    )


def _without(run: str, attempt: str, reason: str) -> dict[str, Any]:
    return {"run": run, "attempt": attempt, "pipeline": None, "missing": [reason]}
