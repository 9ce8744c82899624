"""Runs, ranks, layouts and columns."""

from __future__ import annotations

import base64
import re
import time
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Response

from ddpobs_server.api import schemas
from ddpobs_server.api.concurrency import ConcurrencyLimitedRoute
from ddpobs_server.api.deps import (
    Admin,
    AttemptDep,
    FromQuery,
    ModuleQuery,
    RankQuery,
    Reader,
    ReportsDep,
    RunDep,
    SettingsDep,
    StoreDep,
    ToQuery,
)
from ddpobs_server.api.responses import columns_answer
from ddpobs_server.reports.reports import Reports
from ddpobs_server.reports.run_state import RunState, state_of_rank, state_of_run
from ddpobs_server.settings import Settings
from ddpobs_server.store import Rollup, Run, Source
from ddpobs_server.web.problems import Problem

router = APIRouter(prefix="/api/v1", tags=["runs"], route_class=ConcurrencyLimitedRoute)

_PAGE_ROWS = 100_000
"""About how many rows of columns one answer holds."""
_CURSOR = re.compile(r"([1-8]?\d{1,18})/([A-Za-z0-9._/-]{1,128})", re.ASCII)


@router.get("/runs")
def list_runs(
    caller: Reader,
    store: StoreDep,
    reports: ReportsDep,
    settings: SettingsDep,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: Annotated[str | None, Query(max_length=512)] = None,
    state: RunState | None = None,
) -> schemas.RunPage:
    """Runs, those first seen last coming first, so that none moves while you turn pages.

    `next` is the cursor of the next page; `state` filters within a page.

    `diagnosis` is what was found when somebody last asked, with the title of the worst finding; `current` says that
    nothing came since.
    """
    page = store.runs(limit, _from_cursor(cursor), caller.workspace)
    shown: list[schemas.ListedRun] = [
        {**_run_json(run, settings), "diagnosis": _diagnosis_json(reports, run)} for run in page
    ]
    return {
        "runs": [run for run in shown if state in (None, run["state"])],
        "next": _to_cursor(page[-1]) if len(page) == limit else None,
    }


@router.get("/runs/{run}")
def get_run(run: RunDep, store: StoreDep, settings: SettingsDep) -> schemas.RunDetails:
    """One run, with its attempts, its modules and what its lowest rank said of itself."""
    sources = store.sources(run.run, run.attempt)
    hello = next((source.hello for source in sources if source.hello), None)
    names = {layout.module: layout.name for layout in store.layouts(run.run, run.attempt)}
    return {
        **_run_json(run, settings),
        "attempts": store.attempts(run.run),
        "hello": msgspec.to_builtins(hello),
        "modules": [{"module": module, "name": name} for module, name in sorted(names.items())],
    }


@router.delete("/runs/{run}", status_code=204)
def delete_run(run: RunDep, _admin: Admin, store: StoreDep) -> Response:
    """Remove everything of a run."""
    store.delete(run.run)
    return Response(status_code=204)


@router.get("/runs/{run}/ranks")
def get_ranks(run: RunDep, attempt: AttemptDep, store: StoreDep, settings: SettingsDep) -> schemas.Ranks:
    """Each rank's process, state, counts, mean phases and last pulse."""
    rollups = {rollup.rank: rollup for rollup in store.rollups(run.run, attempt)}
    ranks = [_rank_json(source, rollups.get(source.rank), settings) for source in store.sources(run.run, attempt)]
    return {"run": run.name, "attempt": attempt, "ranks": ranks}


@router.get("/runs/{run}/layout")
def get_layout(run: RunDep, attempt: AttemptDep, store: StoreDep, module: ModuleQuery = None) -> schemas.Layouts:
    """Which parameters are in which bucket, by module and revision."""
    layouts: list[schemas.Layout] = [
        {
            "module": layout.module,
            "name": layout.name,
            "revision": layout.revision,
            "comm": layout.comm,
            "buckets": [
                {
                    "bucket": index,
                    "size_bytes": bucket.size_bytes,
                    "dtype": bucket.dtype,
                    "parameters": msgspec.to_builtins(bucket.parameters),
                }
                for index, bucket in enumerate(layout.buckets)
            ],
        }
        for layout in store.layouts(run.run, attempt)
        if module in (None, layout.module)
    ]
    return {"run": run.name, "attempt": attempt, "layouts": layouts}


@router.get("/runs/{run}/steps", response_model=schemas.Columns)
def get_steps(
    run: RunDep,
    attempt: AttemptDep,
    store: StoreDep,
    reports: ReportsDep,
    rank: RankQuery = None,
    first: FromQuery = None,
    last: ToQuery = None,
    mean: Annotated[bool, Query(description="Wall time and phases only, the mean over the ranks.")] = False,
) -> Response:
    """Steps in columns, sorted by step and rank; `next` is where to go on from, where one answer does not hold all."""
    if mean:
        return columns_answer(run.name, attempt, *reports.mean_steps(run.run, attempt, first, last))
    end = store.page_end("steps", run.run, attempt, rank=rank, first=first, last=last, rows=_PAGE_ROWS)
    ranks, steps = store.steps(run.run, attempt, rank, first, last if end is None else end)
    columns = {"rank": ranks} | steps.by_name()
    return columns_answer(run.name, attempt, columns, None if end is None else end + 1)


@router.get("/runs/{run}/spans", response_model=schemas.Columns)
def get_spans(
    run: RunDep,
    attempt: AttemptDep,
    store: StoreDep,
    reports: ReportsDep,
    rank: RankQuery = None,
    first: FromQuery = None,
    last: ToQuery = None,
    module: ModuleQuery = None,
) -> Response:
    """Bucket spans in columns, sorted by step and rank, also on one rank's clock (`aligned_…`); `next` as in steps."""
    # The other ranks' spans are needed to align one's.
    end = store.page_end("spans", run.run, attempt, first=first, last=last, rows=_PAGE_ROWS)
    columns = reports.aligned_spans(run.run, attempt, rank, first, last if end is None else end, module=module)
    return columns_answer(run.name, attempt, columns, None if end is None else end + 1)


@router.get("/runs/{run}/buckets")
def get_buckets(run: RunDep, attempt: AttemptDep, store: StoreDep, module: ModuleQuery = None) -> schemas.Buckets:
    """Mean times of each bucket over all ranks and steps."""
    layouts = {(layout.module, layout.revision): layout for layout in store.layouts(run.run, attempt)}
    buckets: list[schemas.Bucket] = []
    for row in store.bucket_rollups(run.run, attempt):
        if module not in (None, row.module):
            continue
        layout = layouts.get((row.module, row.revision))
        known = layout.buckets[row.bucket] if layout and row.bucket < len(layout.buckets) else None
        buckets.append(
            {
                "module": row.module,
                "revision": row.revision,
                "bucket": row.bucket,
                "size_bytes": known.size_bytes if known else None,
                "dtype": known.dtype if known else None,
                "parameters": len(known.parameters) if known else None,
                "steps": row.steps,
                "compute_ns": row.compute_ns // row.steps,
                "comm_ns": row.comm_ns // row.steps,
                "exposed_ns": row.exposed_ns // row.steps,
            }
        )
    return {"run": run.name, "attempt": attempt, "buckets": buckets}


@router.get("/runs/{run}/unused")
def get_unused(
    run: RunDep,
    attempt: AttemptDep,
    store: StoreDep,
    module: ModuleQuery = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> schemas.UnusedSets:
    """Unused parameters by name, each time the set changed: each rank's latest sets, by rank, the oldest first."""
    told = store.unused(run.run, attempt, module, limit)
    unused: list[schemas.UnusedSet] = [
        {
            "rank": rank,
            "step": record.step,
            "module": record.module,
            "locally": record.locally,
            "globally": record.globally,
        }
        for rank, record in told
    ]
    return {"run": run.name, "attempt": attempt, "unused": unused}


def _run_json(run: Run, settings: Settings) -> schemas.RunSummary:
    """A run as lists show it."""
    return {
        "run": run.name,
        "state": state_of_run(run, settings, time.time_ns()),
        "attempt": run.attempt,
        "created_ns": run.created_ns,
        "last_seen_ns": run.last_seen_ns,
        "world_size": run.world_size,
        "ranks": run.ranks,
        "steps": run.steps,
        "emitted": run.emitted,
        "dropped": run.dropped,
    }


def _rank_json(source: Source, rollup: Rollup | None, settings: Settings) -> schemas.Rank:
    hello = source.hello
    return {
        "rank": source.rank,
        "state": state_of_rank(source, settings, time.time_ns()),
        "source": source.source,
        "host": hello.host if hello else None,
        "device": hello.device if hello else None,
        "backend": hello.backend if hello else None,
        "pid": hello.pid if hello else None,
        "steps": rollup.steps if rollup else 0,
        "last_step": source.last_step,
        "last_seen_ns": source.last_seen_ns,
        "clock_ahead_ns": source.anchor.wall_ns - source.last_seen_ns,
        "emitted": source.emitted,
        "dropped": source.dropped,
        "phases_ns": {phase: total // rollup.steps for phase, total in rollup.phases_ns.items()} if rollup else None,
        "own_ns": rollup.own_ns // rollup.own_steps if rollup and rollup.own_steps else None,
        "pulse": msgspec.to_builtins(source.pulse),
        "goodbye": source.goodbye,
    }


def _diagnosis_json(reports: Reports, run: Run) -> schemas.LastDiagnosis | None:
    told, current = reports.last_diagnosis(run)
    if told is None:
        return None
    worst = told["findings"][0]["title"] if told["findings"] else None
    return {"worst": worst, "findings": len(told["findings"]), "missing": len(told["missing"]), "current": current}


def _to_cursor(run: Run) -> str:
    return base64.urlsafe_b64encode(f"{run.created_ns}/{run.run}".encode()).decode()


def _from_cursor(cursor: str | None) -> tuple[int, str] | None:
    if cursor is None:
        return None
    try:
        found = _CURSOR.fullmatch(base64.urlsafe_b64decode(cursor.encode()).decode())
    except ValueError:
        found = None
    if found is None:
        raise Problem(422, "Bad cursor", "cursor: expected what `next` gave", field="cursor")
    return int(found[1]), found[2]
