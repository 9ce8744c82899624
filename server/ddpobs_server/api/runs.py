"""Routes of runs, ranks, layouts and columns."""

from __future__ import annotations

import base64
import re
import time
from typing import Annotated, Any, cast

import msgspec
from fastapi import APIRouter, Query, Response

from ddpobs import wire
from ddpobs.wire.states import RunState
from ddpobs_server.api import schemas
from ddpobs_server.api.columns import with_null
from ddpobs_server.api.concurrency import ConcurrencyLimitedRoute
from ddpobs_server.api.deps import (
    Admin,
    AttemptDep,
    ModuleQuery,
    RankQuery,
    Reader,
    ReportsDep,
    RunDep,
    SettingsDep,
    StepRangeDep,
    StoreDep,
)
from ddpobs_server.api.responses import columns_response, json_response, within_answer
from ddpobs_server.reports.digests import RunDigest, labels_of, trained_labels
from ddpobs_server.reports.reports import Reports
from ddpobs_server.reports.run_state import state_of_rank, state_of_run
from ddpobs_server.settings import Settings
from ddpobs_server.store import BucketRollup, LayoutOutline, Rollup, Run, Source
from ddpobs_server.web.problems import Problem

router = APIRouter(prefix="/api/v1", tags=["runs"], route_class=ConcurrencyLimitedRoute)

_PAGE_ROWS = 100_000
"""Approximate number of rows of columns in one response."""
_CURSOR = re.compile(r"([1-8]?\d{1,18})/([A-Za-z0-9._/-]{1,128})", re.ASCII)
_MAX_BUCKETS = 50_000
"""Most buckets in an answer: of all modules and revisions."""
_SOURCE_FIELDS = tuple(schemas.SourceFields.__annotations__)
_HELLO_FIELDS = tuple(schemas.ProcessFields.__annotations__)


@router.get("/runs")
def list_runs(
    caller: Reader,
    store: StoreDep,
    reports: ReportsDep,
    settings: SettingsDep,
    limit: Annotated[int, Query(ge=1, le=500, description="Most runs of a page.")] = 50,
    cursor: Annotated[str | None, Query(max_length=512, description="`next` of the page before.")] = None,
    state: Annotated[RunState | None, Query(description="Only runs of this state, of this page.")] = None,
    seen_after_ns: Annotated[
        int, Query(ge=0, le=2**62, description="Only runs with a batch after this Unix time, in ns.")
    ] = 0,
) -> schemas.RunPage:
    """Runs, newest first by their creation, so that no run moves between pages.

    `next` is the cursor of the next page; `state` filters within a page. With `seen_after_ns` a list that is known
    already is kept up to date.

    Step times and rate of a live run may be those of five seconds ago.

    `diagnosis` is the result of the last request for diagnostics, with the verdict of the worst finding. `current` is
    true if no batch arrived since, and the run is over or lost, or the result is younger than two seconds.
    """
    page = store.runs(limit, _from_cursor(cursor), caller.workspace, seen_after_ns)
    digests = reports.digests.of(page)
    runs = [_listed_run(run, digest, reports, settings) for run, digest in zip(page, digests, strict=True)]
    return {
        "runs": [run for run in runs if state in (None, run["state"])],
        "next": _to_cursor(page[-1]) if len(page) == limit else None,
    }


@router.get("/runs/{run}")
def get_run(run: RunDep, store: StoreDep, settings: SettingsDep) -> schemas.RunDetails:
    """One run, with its attempts, its modules and the hello of its lowest rank."""
    sources = store.sources(run.run, run.attempt)
    hello = next((source.hello for source in sources if source.hello), None)
    names = {outline.module: outline.name for outline in store.layout_outlines(run.run, run.attempt)}
    tags, note = labels_of(run, trained_labels(hello))
    return {
        **_run_json(run, settings),
        "tags": tags,
        "note": note,
        "attempts": store.attempts(run.run),
        "hello": msgspec.to_builtins(hello),
        "modules": [{"module": module, "name": name} for module, name in sorted(names.items())],
    }


@router.get("/runs/{run}/attempts")
def get_attempts(run: RunDep, reports: ReportsDep) -> schemas.Attempts:
    """Each attempt with its outcome, the reason, the first rank to fail and its times, oldest first."""
    return {"run": run.name, "attempts": reports.attempts(run)}


@router.delete("/runs/{run}", status_code=204)
def delete_run(run: RunDep, _admin: Admin, store: StoreDep) -> Response:
    """Delete all data of a run."""
    store.delete(run.run)
    return Response(status_code=204)


@router.get("/runs/{run}/ranks")
def get_ranks(run: RunDep, attempt: AttemptDep, store: StoreDep, settings: SettingsDep) -> schemas.Ranks:
    """Each rank's process, state, counts, mean phases and last pulse."""
    rollups = {rollup.rank: rollup for rollup in store.rollups(run.run, attempt)}
    ranks = [_rank_json(source, rollups.get(source.rank), settings) for source in store.sources(run.run, attempt)]
    return {"run": run.name, "attempt": attempt, "ranks": ranks}


@router.get("/runs/{run}/layout", response_model=schemas.Layouts)
def get_layout(run: RunDep, attempt: AttemptDep, store: StoreDep, module: ModuleQuery = None) -> Response:
    """Parameters of each bucket, by module and revision.

    `left_out` counts the layouts that did not fit into 16 MB; request them with `module`.
    """
    stored, left_out = store.layouts(run.run, attempt, module)
    layouts = [
        {
            "module": layout.module,
            "name": layout.name,
            "revision": layout.revision,
            "comm": layout.comm,
            "buckets": [
                {"bucket": index, **msgspec.structs.asdict(bucket)} for index, bucket in enumerate(layout.buckets)
            ],
        }
        for layout in stored
    ]
    return json_response({"run": run.name, "attempt": attempt, "layouts": layouts, "left_out": left_out})


@router.get("/runs/{run}/steps", response_model=schemas.StepPage)
def get_steps(
    run: RunDep,
    steps: StepRangeDep,
    store: StoreDep,
    reports: ReportsDep,
    rank: RankQuery = None,
    mean: Annotated[bool, Query(description="Wall time and phases only, the mean over the ranks.")] = False,
    points: Annotated[int | None, Query(ge=1, le=10_000, description="Bins instead of steps, at most as many.")] = None,
) -> Response:
    """Steps in columns, sorted by step and rank; `next` is the first step that did not fit into this response.

    With `points` the run, or `from` to `to`, is divided into bins: minimum, median and maximum of the wall time and the
    phases of each rank. With `mean` too, the minimum, the median of the medians and the maximum over the ranks.
    """
    attempt, first, last = steps.attempt, steps.first, steps.last
    if points is not None:
        bins = reports.step_bins(run.run, attempt, (first, last), points, rank, mean=mean)
        return columns_response(run.name, attempt, *bins)
    if mean:
        return columns_response(run.name, attempt, *reports.mean_steps(run.run, attempt, first, last))
    end = store.page_end("steps", run.run, attempt, rank=rank, first=first, last=last, rows=_PAGE_ROWS)
    ranks, columns = store.steps(run.run, attempt, rank, first, last if end is None else end)
    next_step = None if end is None else end + 1
    return columns_response(run.name, attempt, with_null({"rank": ranks} | columns.by_name(), wire.Steps), next_step)


@router.get("/runs/{run}/spans", response_model=schemas.SpanPage)
def get_spans(
    run: RunDep,
    steps: StepRangeDep,
    store: StoreDep,
    reports: ReportsDep,
    rank: RankQuery = None,
    module: ModuleQuery = None,
) -> Response:
    """Bucket spans in columns, sorted by step and rank, also on one rank's clock (`aligned_…`); `next` as in steps."""
    attempt, first, last = steps.attempt, steps.first, steps.last
    # Aligning one rank's spans needs the other ranks' spans too, so the page is counted over all ranks.
    end = store.page_end("spans", run.run, attempt, first=first, last=last, rows=_PAGE_ROWS)
    columns = reports.aligned_spans(run.run, attempt, rank, first, last if end is None else end, module=module)
    return columns_response(run.name, attempt, with_null(columns, wire.Spans), None if end is None else end + 1)


@router.get("/runs/{run}/buckets", response_model=schemas.Buckets)
def get_buckets(run: RunDep, attempt: AttemptDep, store: StoreDep, module: ModuleQuery = None) -> Response:
    """Mean times of each bucket over all ranks and steps; `complete` is false if there are more than 50,000 buckets."""
    outlines = {(outline.module, outline.revision): outline for outline in store.layout_outlines(run.run, attempt)}
    rows, is_short = store.bucket_rollups(run.run, attempt, _MAX_BUCKETS)
    buckets = [
        _bucket_json(row, outlines.get((row.module, row.revision))) for row in rows if module in (None, row.module)
    ]
    return json_response({"run": run.name, "attempt": attempt, "buckets": buckets, "complete": not is_short})


@router.get("/runs/{run}/unused", response_model=schemas.UnusedSets)
def get_unused(
    run: RunDep,
    attempt: AttemptDep,
    store: StoreDep,
    module: ModuleQuery = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Most sets of an answer.")] = 1000,
) -> Response:
    """Names of unused parameters at each change of the set: each rank's latest sets, by rank, the oldest first.

    `left_out` counts the sets within `limit` whose names did not fit into the answer.
    """
    stored, left_out = store.unused(run.run, attempt, module, limit)
    fitting, beyond = within_answer(stored)
    unused = [{"rank": rank, **msgspec.structs.asdict(record)} for rank, record in fitting]
    return json_response({"run": run.name, "attempt": attempt, "unused": unused, "left_out": left_out + beyond})


def _bucket_json(row: BucketRollup, outline: LayoutOutline | None) -> schemas.Bucket:
    if outline is not None and row.bucket >= len(outline.dtypes):
        outline = None
    return {
        "module": row.module,
        "revision": row.revision,
        "bucket": row.bucket,
        "size_bytes": int(outline.size_bytes[row.bucket]) if outline else None,
        "dtype": outline.dtypes[row.bucket] if outline else None,
        "parameters": int(outline.parameters[row.bucket]) if outline else None,
        "steps": row.steps,
        "compute_ns": row.compute_ns // row.steps,
        "comm_ns": row.comm_ns // row.steps,
        "exposed_ns": row.exposed_ns // row.steps,
    }


def _run_json(run: Run, settings: Settings) -> schemas.RunSummary:
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


def _listed_run(run: Run, digest: RunDigest, reports: Reports, settings: Settings) -> schemas.ListedRun:
    tags, note = labels_of(run, (digest.tags, digest.note))
    return {
        **_run_json(run, settings),
        "tags": tags,
        "note": note,
        "diagnosis": _diagnosis_json(reports, run),
        "duration_ns": max(0, run.last_seen_ns - run.created_ns),
        "step_ns": digest.step_ns,
        "steps_per_s": digest.steps_per_s,
        "step_times_ns": list(digest.step_times_ns),
        "host": digest.host,
    }


def _rank_json(source: Source, rollup: Rollup | None, settings: Settings) -> schemas.Rank:
    computed: schemas.RankFields = {
        "state": state_of_rank(source, settings, time.time_ns()),
        "steps": rollup.steps if rollup else 0,
        "clock_ahead_ns": source.anchor.wall_ns - source.last_seen_ns,
        "phases_ns": {phase: total // rollup.steps for phase, total in rollup.phases_ns.items()} if rollup else None,
        "own_ns": rollup.own_ns // rollup.own_steps if rollup and rollup.own_steps else None,
        "pulse": None if source.pulse is None else _without_unknown(msgspec.to_builtins(source.pulse)),
    }
    stored = {name: getattr(source, name) for name in _SOURCE_FIELDS}
    process = {name: getattr(source.hello, name, None) for name in _HELLO_FIELDS}
    return cast(schemas.Rank, stored | process | computed)


def _without_unknown(pulse: dict[str, Any]) -> Any:
    """Return a pulse with null for each number that is unknown on the wire."""
    machine = pulse["machine"]
    if machine is not None:
        machine = {name: None if value == wire.UNKNOWN else value for name, value in machine.items()}
    indexes = {name: None if pulse[name] == wire.UNKNOWN else pulse[name] for name in ("module", "bucket")}
    return pulse | indexes | {"machine": machine}


def _diagnosis_json(reports: Reports, run: Run) -> schemas.LastDiagnosis | None:
    diagnosis, current = reports.last_diagnosis(run)
    if diagnosis is None:
        return None
    findings, missing = diagnosis["findings"], diagnosis["missing"]
    worst = findings[0] if findings else {}
    return {
        "worst": worst.get("verdict"),
        "severity": worst.get("severity"),
        "code": worst.get("code"),
        "gain": worst.get("gain"),
        "goodput": diagnosis["goodput"],
        "findings": len(findings),
        "missing": len(missing),
        "current": current,
    }


def _to_cursor(run: Run) -> str:
    return base64.urlsafe_b64encode(f"{run.created_ns}/{run.run}".encode()).decode()


def _from_cursor(cursor: str | None) -> tuple[int, str] | None:
    if cursor is None:
        return None
    try:
        match = _CURSOR.fullmatch(base64.urlsafe_b64decode(cursor.encode()).decode())
    except ValueError:
        match = None
    if match is None:
        raise Problem(422, "Bad cursor", "cursor: expected the value of `next`", field="cursor")
    return int(match[1]), match[2]
