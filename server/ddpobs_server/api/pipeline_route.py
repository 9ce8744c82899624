"""The route of an attempt's pipeline."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response
from typing_extensions import TypedDict

from ddpobs_server.api.concurrency import ConcurrencyLimitedRoute
from ddpobs_server.api.deps import AttemptDep, ReportsDep, RunDep
from ddpobs_server.api.fields import AttemptResponse, StepCount, StepNs, doc
from ddpobs_server.api.responses import json_response

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["diagnosis"], route_class=ConcurrencyLimitedRoute)


class PipelineStage(TypedDict):
    """Ranks that hold the same stages. Times of a step are medians over the steps, and means over the replicas."""

    stages: Annotated[list[int], doc("Indices of the stages.")]
    ranks: Annotated[list[int], doc("The ranks.")]
    steps: StepCount
    step_ns: StepNs
    schedule_ns: Annotated[int, doc("The schedule's step, from call to return, in nanoseconds.")]
    computing_ns: Annotated[int, doc("Forward and backward of a step's micro-batches, in nanoseconds.")]
    receive_wait_ns: Annotated[int, doc("Waits for messages of other stages, in nanoseconds.")]
    send_wait_ns: Annotated[int, doc("Waits until other stages took messages, in nanoseconds.")]
    bubble: Annotated[float, doc("Share of the waits for messages in the schedule's step.")]
    reduce_ns: Annotated[
        int | None, doc("Time with a gradient all-reduce in flight, in nanoseconds; null if it is not known.")
    ]
    reduce_wait_ns: Annotated[int | None, doc("Wait for the all-reduce, in nanoseconds; null if it is not known.")]
    reduce_exposed_ns: Annotated[
        int | None, doc("Wait for the all-reduce that held the pipeline up, in nanoseconds; null if not known.")
    ]
    reduce_overlap: Annotated[
        float | None, doc("Share of the all-reduce during which this stage or an earlier one worked; null without one.")
    ]


class Pipeline(TypedDict):
    """A schedule and its stages."""

    schedule: Annotated[str, doc("Class of the schedule.")]
    stages: Annotated[int, doc("Number of stages of the whole pipeline.")]
    micro_batches: Annotated[int, doc("Micro-batches of a step.")]
    expected_bubble: Annotated[
        float | None, doc("Bubble by the schedule's formula, for equal stages; null without a formula.")
    ]
    predicted_ns: Annotated[int, doc("Time of the schedule's step, from the stages' computation, in nanoseconds.")]
    by_rank: Annotated[list[PipelineStage], doc("The stages, by the ranks that hold them.")]


class PipelineResponse(AttemptResponse):
    """The pipeline of an attempt; null without one."""

    pipeline: Annotated[Pipeline | None, doc("The pipeline; null without one.")]
    missing: Annotated[list[str], doc("Questions that could not be answered, each with the reason.")]


@router.get("/pipeline", response_model=PipelineResponse)
def get_pipeline(run: RunDep, attempt: AttemptDep, reports: ReportsDep) -> Response:
    """Stages of a pipeline: computation, waits for messages, bubble, and the overlap of the all-reduce.

    Medians over the latest steps. `pipeline` is null for a run without a schedule; `missing` has the reason.
    """
    return json_response(reports.pipeline(run.run, attempt) | {"run": run.name})
