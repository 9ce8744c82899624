"""The route that predicts steps after a change."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response
from typing_extensions import TypedDict

from ddpobs import wire
from ddpobs.whatif.model import Change
from ddpobs_server.api.concurrency import ConcurrencyLimitedRoute
from ddpobs_server.api.deps import AttemptDep, ReportsDep, RunDep
from ddpobs_server.api.fields import AttemptResponse, Missing, WorldSize, doc
from ddpobs_server.api.responses import json_response
from ddpobs_server.reports.whatif import Question
from ddpobs_server.web.problems import Problem

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["diagnosis"], route_class=ConcurrencyLimitedRoute)
_MAX_ANSWERS, _MAX_CAPS, _MAX_CAP_MB = 64, 1000, 1e6
_BEST = "best"
_Positive = Annotated[float | None, Query(ge=1e-6, le=1e6)]


class WhatIfModel(TypedDict):
    """The model that the run's steps gave."""

    alpha_ns: Annotated[int | None, doc("Latency of one all-reduce, in nanoseconds; null if it is not known.")]
    beta_bytes_per_s: Annotated[int | None, doc("Bytes a second without latency; null if it is not known.")]
    slowdown_ratio: Annotated[
        float | None,
        doc("Extra time of computation beside communication, as a share; null if it was not measured."),
    ]
    noise_ns: Annotated[int, doc("Error of the other blocks' step time as a prediction of a block's, in nanoseconds.")]
    replay_error_ns: Annotated[int, doc("Difference of replayed and measured exposed communication, in nanoseconds.")]
    splits_buckets: Annotated[
        bool, doc("Whether the arrival of each parameter is known, so that buckets can be split.")
    ]
    strategy: Annotated[str, doc("The present communication strategy.")]
    batches: Annotated[int, doc("Batches that are added before a reduction.")]
    world_size: WorldSize


class WhatIfStep(TypedDict):
    """One batch. Times of buckets begin at the step's first gradient."""

    step_ns: Annotated[int, doc("Time of a batch, in nanoseconds.")]
    exposed_ns: Annotated[int, doc("Communication that backward does not hide, in nanoseconds.")]
    batches: Annotated[int, doc("Batches of the step, all but the last without a reduction.")]
    bucket_bytes: Annotated[list[int], doc("Size of each bucket in bytes, in launch order.")]
    ready_ns: Annotated[list[int], doc("Readiness of each bucket, in nanoseconds.")]
    begun_ns: Annotated[list[int], doc("Begin of each bucket's transfer, in nanoseconds.")]
    done_ns: Annotated[list[int], doc("End of each bucket's transfer, in nanoseconds.")]


class SlowRanks(TypedDict):
    """What slow ranks cost: step time over that of ranks that work like the median rank in each phase.

    In a pipeline it is the time of the replayed computation, over that of ranks that compute for the mean time.
    """

    slowdown: Annotated[float, doc("S = T / T_ideal (arXiv 2505.05713).")]
    lost_ratio: Annotated[float, doc("Share of the ranks' time that is lost: 1 - 1 / S.")]
    by_rank: Annotated[list[float], doc("S with only this rank as slow as it is, in the order of the ranks.")]
    by_phase: Annotated[dict[str, float], doc("S with only this phase as slow as it is, by phase.")]


class WhatIfPrediction(WhatIfStep):
    """A predicted batch, with its interval."""

    low_ns: Annotated[
        int, doc("Lower end of the interval of the step that a launch with the change measures, in nanoseconds.")
    ]
    high_ns: Annotated[
        int, doc("Upper end of the interval of the step that a launch with the change measures, in nanoseconds.")
    ]
    saved_ns: Annotated[int, doc("Saving of a batch, in nanoseconds; negative for a loss.")]
    saved_ratio: Annotated[float, doc("Saving as a share of a batch's time.")]
    error_ratio: Annotated[
        float,
        doc("Half of the interval of `saved_ratio`, as a share of a batch's time, without the noise between launches."),
    ]
    words: Annotated[str, doc("The saving in words.")]


class WhatIfAnswer(TypedDict):
    """One change, and what it would give."""

    change: Annotated[str, doc("The change in words.")]
    caps_mb: Annotated[list[float], doc("Limits of the first bucket, the second, and so on, in MB; empty if as now.")]
    refused: Annotated[str, doc("Why the run does not show it; empty if it does.")]
    prediction: Annotated[WhatIfPrediction | None, doc("The predicted batch; null if it is refused.")]


class WhatIf(AttemptResponse):
    """The model of an attempt's steps, and an answer to each change."""

    model: Annotated[WhatIfModel | None, doc("The model; null if the run does not give one.")]
    now: Annotated[WhatIfStep | None, doc("The replayed batch as it is; null without a model.")]
    slow_ranks: Annotated[SlowRanks | None, doc("What slow ranks cost; null if own times are not recorded.")]
    answers: Annotated[list[WhatIfAnswer], doc("Answers, in the order of the caps, and of the strategies for each.")]
    missing: Missing


def _questions(
    bucket_cap_mb: Annotated[
        str,
        Query(
            max_length=4000,
            description="Caps in MB, separated by commas: an answer for each. `best` seeks the best one. "
            "`1:5:25` is one list: limits of the first bucket, the second, and all further ones.",
        ),
    ] = "",
    first_bucket_mb: Annotated[_Positive, Query(description="Limit of the first bucket in MB.")] = None,
    compression: Annotated[
        str, Query(max_length=200, description="Strategies of `comm=`, separated by commas: an answer for each.")
    ] = "",
    accumulate: Annotated[
        int | None, Query(ge=1, le=10_000, description="Batches whose gradients are added before a reduction.")
    ] = None,
    groups: Annotated[int | None, Query(ge=1, le=64, description="Process groups that take buckets in turn.")] = None,
    world_size: Annotated[int | None, Query(ge=2, le=2**20, description="Number of ranks.")] = None,
    link_gbps: Annotated[_Positive, Query(description="Gigabits a second of the link between ranks.")] = None,
    link_factor: Annotated[
        _Positive, Query(description="How many times as many bytes a second the link moves.")
    ] = None,
    repair: Annotated[int | None, Query(ge=0, le=2**20 - 1, description="Rank that works like the others.")] = None,
    halve: Annotated[
        str | None,
        Query(pattern=f"^({'|'.join(wire.OWN_PHASES)})$", description="Phase of `repair` that is only half as slow."),
    ] = None,
    find_unused: Annotated[bool | None, Query(description="`false`: without `find_unused_parameters`.")] = None,
) -> list[Question]:
    beside = Change(
        batches=accumulate,
        groups=groups,
        world_size=world_size,
        link_gbps=link_gbps,
        link_factor=link_factor,
        repaired_rank=repair,
        repaired_phase=halve,
        find_unused=find_unused,
    )
    if link_gbps is not None and link_factor is not None:
        raise _problem("link_factor", "one of link_gbps and link_factor", "both")
    if halve is not None and repair is None:
        raise _problem("halve", "a rank in repair", "none")
    caps = [part.strip() for part in bucket_cap_mb.split(",") if part.strip()] or [""]
    strategies: list[str | None] = [part.strip() for part in compression.split(",") if part.strip()]
    pairs = list(product(caps, strategies or [None]))
    if len(pairs) > _MAX_ANSWERS:
        raise _problem("bucket_cap_mb", f"at most {_MAX_ANSWERS} answers", f"{len(pairs)}")
    if first_bucket_mb is not None and not bucket_cap_mb.replace(_BEST, ""):
        raise _problem("first_bucket_mb", "caps in bucket_cap_mb", "none")
    first = () if first_bucket_mb is None else (first_bucket_mb,)
    return [_question(beside, first, cap, strategy) for cap, strategy in pairs]


def _question(beside: Change, first: tuple[float, ...], cap: str, strategy: str | None) -> Question:
    limits = None if cap in ("", _BEST) else first + _limits(cap)
    return Question(replace(beside, caps_mb=limits, strategy=strategy), seeks_caps=cap == _BEST)


def _limits(text: str) -> tuple[float, ...]:
    try:
        limits = tuple(map(float, text.split(":")))
    except ValueError:
        limits = ()
    if not limits or len(limits) > _MAX_CAPS or not all(0 < limit <= _MAX_CAP_MB for limit in limits):
        expected = f"numbers from above 0 to {_MAX_CAP_MB:.0f} MB, as 1,5,25, or as 1:5:25 for one list, or {_BEST}"
        raise _problem("bucket_cap_mb", expected, text[:64])
    return limits


def _problem(field: str, expected: str, got: str) -> Problem:
    return Problem(422, "Invalid parameter", f"query.{field}: expected {expected}, got {got}", field=f"query.{field}")


QuestionsDep = Annotated[list[Question], Depends(_questions)]


@router.get("/whatif", response_model=WhatIf)
def get_whatif(run: RunDep, attempt: AttemptDep, questions: QuestionsDep, reports: ReportsDep) -> Response:
    """Predicted time of a batch after a change, with an interval, from the attempt's own latest steps.

    All given changes hold together. What the run does not show is refused with the reason.
    """
    return json_response(reports.whatif(run.run, attempt, questions) | {"run": run.name})
