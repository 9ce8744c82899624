"""Who is slow, why, and what would help."""

from __future__ import annotations

from fastapi import APIRouter, Response

from ddpobs_server.api import schemas
from ddpobs_server.api.concurrency import ConcurrencyLimitedRoute
from ddpobs_server.api.deps import AttemptDep, FromQuery, ReportsDep, RunDep, ToQuery
from ddpobs_server.api.responses import json_answer
from ddpobs_server.reports.reports import TooManyStepsError
from ddpobs_server.web.problems import Problem

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["diagnosis"], route_class=ConcurrencyLimitedRoute)


@router.get("/stragglers", response_model=schemas.Stragglers)
def get_stragglers(
    run: RunDep, attempt: AttemptDep, reports: ReportsDep, first: FromQuery = None, last: ToQuery = None
) -> Response:
    """Own time of each rank in each step, how far that is above the other ranks' median, who was last, and by how much.

    Of the latest steps where none are named. `next` is where to go on from, where one answer does not hold all.
    """
    return json_answer(reports.stragglers(run.run, attempt, first, last) | {"run": run.name})


@router.get("/diagnostics", response_model=schemas.Diagnostics)
def get_diagnostics(run: RunDep, attempt: AttemptDep, reports: ReportsDep) -> Response:
    """Findings with evidence, remedy and gain; `missing` says what could not be judged, and why."""
    return json_answer(reports.diagnostics(run.run, attempt) | {"run": run.name})


@router.get("/trace", response_model=schemas.Trace)
def get_trace(
    run: RunDep, attempt: AttemptDep, reports: ReportsDep, first: FromQuery = None, last: ToQuery = None
) -> Response:
    """Steps as a Chrome trace, all ranks on one clock: open it in Perfetto or chrome://tracing.

    The latest 50 steps where none are named. A trace holds about 100,000 events, phases and buckets, or one step. Where
    `from` and `to` ask for more, the answer is 422 and says which steps fit; with an end left open it has fewer steps.
    """
    try:
        return json_answer(reports.trace(run.run, attempt, first, last))
    except TooManyStepsError as error:
        raise Problem(
            422,
            "Too many steps",
            f"to: expected at most {error.fits_until} for a trace from step {first} on, got {last}; ask for fewer",
            field="query.to",
        ) from None
