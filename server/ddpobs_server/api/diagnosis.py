"""Routes that report which rank is slow, why, and the gain of each remedy."""

from __future__ import annotations

from fastapi import APIRouter, Response

from ddpobs_server.api import schemas
from ddpobs_server.api.concurrency import ConcurrencyLimitedRoute
from ddpobs_server.api.deps import AttemptDep, ReportsDep, RunDep, StepRangeDep
from ddpobs_server.api.responses import json_response
from ddpobs_server.reports.reports import TooManyStepsError
from ddpobs_server.web.problems import Problem

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["diagnosis"], route_class=ConcurrencyLimitedRoute)


@router.get("/stragglers", response_model=schemas.Stragglers)
def get_stragglers(run: RunDep, steps: StepRangeDep, reports: ReportsDep) -> Response:
    """Own time of each rank in each step, its excess over the other ranks' median, and the last rank with its delay.

    Without `from` and `to`: the latest steps. `next` is the first step that did not fit into this response.
    """
    return json_response(reports.stragglers(run.run, steps.attempt, steps.first, steps.last) | {"run": run.name})


@router.get("/diagnostics", response_model=schemas.Diagnostics)
def get_diagnostics(run: RunDep, steps: StepRangeDep, reports: ReportsDep) -> Response:
    """Findings with evidence, remedy and gain; `missing` lists the findings that could not be judged, and why.

    `from` and `to` judge a part of the run. `intervals` are the steps in which a finding held, with Unix times.
    """
    answer = reports.diagnostics_between(run.run, steps.attempt, steps.first, steps.last)
    return json_response(answer | {"run": run.name})


@router.get("/account", response_model=schemas.Account)
def get_account(run: RunDep, attempt: AttemptDep, reports: ReportsDep) -> Response:
    """Where the run's wall time went, over all attempts: parts that add up, goodput, and hours lost by cause.

    Times are rank time: wall time times ranks. `attempt` selects the attempt whose ranks are listed. `missing` names
    the ranks whose time is not known, and why.
    """
    return json_response(reports.account(run.run, attempt))


@router.get("/pipeline", response_model=schemas.PipelineResponse)
def get_pipeline(run: RunDep, attempt: AttemptDep, reports: ReportsDep) -> Response:
    """Stages of a pipeline: computation, waits for messages, bubble, and the overlap of the all-reduce.

    Medians over the latest steps. `pipeline` is null for a run without a schedule; `missing` has the reason.
    """
    return json_response(reports.pipeline(run.run, attempt) | {"run": run.name})


@router.get("/trace", response_model=schemas.Trace)
def get_trace(run: RunDep, steps: StepRangeDep, reports: ReportsDep) -> Response:
    """Steps as a Chrome trace with all ranks on one clock, for Perfetto or chrome://tracing.

    Without `from` and `to`: the latest 50 steps. A trace holds about 100,000 events, or one step.
    If `from` and `to` cover more, the response is 422 and names the last step that fits. With one end open, the trace
    has fewer steps instead.
    """
    try:
        return json_response(reports.trace(run.run, steps.attempt, steps.first, steps.last))
    except TooManyStepsError as error:
        fits = f"at most {error.fits_until} for a trace from step {steps.first} on"
        detail = f"to: expected {fits}, got {steps.last}; request fewer steps"
        raise Problem(422, "Too many steps", detail, field="query.to") from None
