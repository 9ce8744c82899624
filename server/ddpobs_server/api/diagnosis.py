"""Routes that report which rank is slow, why, and the gain of each remedy."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from typing_extensions import TypedDict

from ddpobs_server.api.concurrency import ConcurrencyLimitedRoute
from ddpobs_server.api.deps import ReportsDep, RunDep, StepRangeDep, StoreDep
from ddpobs_server.api.fields import (
    AttemptResponse,
    Goodput,
    Missing,
    NextStep,
    PhaseTimes,
    RankId,
    VerdictKind,
    VerdictText,
    doc,
)
from ddpobs_server.api.findings import FindingResponse, StepLevel
from ddpobs_server.api.own_cost import Telemetry
from ddpobs_server.api.responses import json_response
from ddpobs_server.reports.columns import RunColumns
from ddpobs_server.reports.timeline import RunTimeline, TooManyStepsError
from ddpobs_server.web.problems import Problem

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["diagnosis"], route_class=ConcurrencyLimitedRoute)


class Lateness(TypedDict):
    """Shares of steps in which a rank was last or late; its mean delay, median own time, and excess by phase."""

    rank: RankId
    last_share: Annotated[float, doc("Share of the steps in which the rank was last.")]
    late_share: Annotated[float, doc("Share of the steps in which the rank was late.")]
    delay_ns: Annotated[int, doc("Mean time by which the rank delayed the others, in nanoseconds.")]
    own_ns: Annotated[int, doc("Own time of a step: without waiting for other ranks, in nanoseconds.")]
    excess_ns: Annotated[PhaseTimes, doc("Own time above the other ranks' median, by phase, in nanoseconds.")]


class Stragglers(AttemptResponse):
    """By step, and by step and rank."""

    steps: Annotated[list[int], doc("Numbers of the steps, of the lowest rank.")]
    ranks: Annotated[list[int], doc("The ranks.")]
    own_ns: Annotated[list[list[int]], doc("Own time by step and rank, in nanoseconds.")]
    excess_ns: Annotated[
        list[list[int]], doc("Own time above the other ranks' median, by step and rank, in nanoseconds.")
    ]
    delay_ns: Annotated[list[int], doc("Time by which the last rank delayed the others, by step, in nanoseconds.")]
    last_rank: Annotated[list[int], doc("The rank that was last in each step.")]
    noise_ns: Annotated[int, doc("Time by which the ranks' ends of one all-reduce differ, in nanoseconds.")]
    per_rank: Annotated[list[Lateness], doc("Lateness of each rank.")]
    next: NextStep


class Diagnostics(AttemptResponse):
    """Findings, the most severe first; `missing` lists the findings that could not be judged, and why.

    `step_levels` divides the run where the step time of all ranks shifts. `goodput` and `time_shares` are shares of the
    run's wall time, as in its account; null and empty if a part of the run is judged.
    """

    steps_seen: Annotated[int, doc("Number of steps up to the last one that is judged.")]
    verdict: VerdictKind
    summary: VerdictText
    findings: Annotated[list[FindingResponse], doc("The findings, the most severe first.")]
    missing: Missing
    step_levels: Annotated[list[StepLevel], doc("Parts of the run with about the same step time.")]
    goodput: Goodput
    telemetry: Telemetry
    time_shares: Annotated[dict[str, float], doc("Share of the run's wall time, by group.")]


class Trace(TypedDict):
    """Chrome's trace event format."""

    traceEvents: Annotated[list[dict[str, Any]], doc("Events in Chrome's trace event format.")]
    displayTimeUnit: Annotated[Literal["ms", "ns"], doc("Unit in which a viewer shows times.")]
    otherData: Annotated[dict[str, str], doc("Facts about the trace.")]


@router.get("/stragglers", response_model=Stragglers)
def get_stragglers(run: RunDep, steps: StepRangeDep, store: StoreDep) -> Response:
    """Own time of each rank in each step, its excess over the other ranks' median, and the last rank with its delay.

    Without `from` and `to`: the latest steps. `next` is the first step that did not fit into this response.
    """
    return json_response(
        RunColumns(store, run.run, steps.attempt).stragglers(steps.first, steps.last) | {"run": run.name}
    )


@router.get("/diagnostics", response_model=Diagnostics)
def get_diagnostics(run: RunDep, steps: StepRangeDep, reports: ReportsDep) -> Response:
    """Findings with evidence, remedy and gain; `missing` lists the findings that could not be judged, and why.

    `from` and `to` judge a part of the run. `intervals` are the steps in which a finding held, with Unix times.
    """
    diagnosis = reports.diagnostics_between(run.run, steps.attempt, steps.first, steps.last)
    return json_response(diagnosis | {"run": run.name})


@router.get("/trace", response_model=Trace)
def get_trace(run: RunDep, steps: StepRangeDep, store: StoreDep) -> Response:
    """Steps as a Chrome trace with all ranks on one clock, for Perfetto or chrome://tracing.

    Without `from` and `to`: the latest 50 steps. A trace holds about 100,000 events, or one step.
    If `from` and `to` cover more, the response is 422 and names the last step that fits. With one end open, the trace
    has fewer steps instead.
    """
    try:
        return json_response(RunTimeline(store, run.run, steps.attempt).trace(steps.first, steps.last))
    except TooManyStepsError as error:
        fits = f"at most {error.fits_until} for a trace from step {steps.first} on"
        detail = f"to: expected {fits}, got {steps.last}; request fewer steps"
        raise Problem(422, "Too many steps", detail, field="query.to") from None
