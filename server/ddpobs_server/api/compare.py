"""The route that compares two runs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from typing_extensions import TypedDict

from ddpobs.wire.text import NONCE, RUN_ID
from ddpobs_server.analysis.comparison.compare import Kind, Verdict
from ddpobs_server.api.concurrency import ConcurrencyLimitedRoute
from ddpobs_server.api.deps import AttemptDep, Reader, ReportsDep, RunDep, StoreDep, attempt_of, run_of
from ddpobs_server.api.fields import AttemptResponse, RunName, doc
from ddpobs_server.api.findings import FindingResponse
from ddpobs_server.api.responses import json_response

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["diagnosis"], route_class=ConcurrencyLimitedRoute)


class ComparedRun(TypedDict):
    """One of the two runs."""

    run: RunName
    attempt: Annotated[str, doc("Its attempt.")]
    steps: Annotated[
        int, doc("Steps that are compared: the latest, without the first ten of the run and without long steps.")
    ]
    long_steps: Annotated[
        int,
        doc("Long steps among the latest: above the third quartile by more than three times the interquartile range."),
    ]
    run_delay_ns: Annotated[
        int, doc("Mean time per step in which a rank was ready to run and had no processor, in nanoseconds.")
    ]


class Change(TypedDict):
    """A change of one time from run a to run b, with its interval."""

    name: Annotated[str, doc("`step`, `long steps`, a phase, or a bucket with its first parameter.")]
    title: Annotated[str, doc("The name for people: `moving data`, `computation of bucket 1: stem.weight`.")]
    words: Annotated[str, doc("The change in words: `slower by 2.2× (1.9 to 2.5)`; empty if run a has no such time.")]
    kind: Annotated[Kind, doc("Kind of time; `compute` and `comm` are a bucket's computation and communication.")]
    verdict: Annotated[
        Verdict, doc("`same` if no difference was seen; `too-few` if the steps are too few to decide it.")
    ]
    a_ns: Annotated[int, doc("Mean time per step of run a, in nanoseconds.")]
    b_ns: Annotated[int, doc("Mean time per step of run b, in nanoseconds.")]
    change_ns: Annotated[int, doc("Difference b - a, in nanoseconds.")]
    low_ns: Annotated[int, doc("Lower end of the interval of the difference, in nanoseconds.")]
    high_ns: Annotated[int, doc("Upper end of the interval of the difference, in nanoseconds.")]
    smallest_ns: Annotated[
        int, doc("Least difference that would have been seen in 95 % of such pairs of runs, in nanoseconds.")
    ]
    change_ratio: Annotated[float | None, doc("Difference as a share of run a's time; null if that is zero.")]
    low_ratio: Annotated[
        float | None, doc("Lower end of the interval as a share of run a's time; null if that is zero.")
    ]
    high_ratio: Annotated[
        float | None, doc("Upper end of the interval as a share of run a's time; null if that is zero.")
    ]
    smallest_ratio: Annotated[
        float | None,
        doc("Least difference that would have been seen, as a share of run a's time; null if that is zero."),
    ]
    step_share: Annotated[float | None, doc("Share that the time has of run a's step; null if that is zero.")]


class Limit(TypedDict):
    """Whether run b is slower than the limit allows."""

    ratio: Annotated[float, doc("The limit: a share of run a's time.")]
    exceeded: Annotated[list[str], doc("The step and the phases of which the whole interval is above the limit.")]
    words: Annotated[str, doc("The judgement in words: `kept`, `exceeded by step`, `not decided, too few steps`.")]
    decided: Annotated[
        bool, doc("False if the steps are too few or too noisy to judge, or if other programs may explain the change.")
    ]


class Difference(TypedDict):
    """A setting, a version or a part of the layout that differs."""

    name: Annotated[str, doc("Name of the fact.")]
    title: Annotated[str, doc("The name for people: `setting bucket_cap_mb`.")]
    a: Annotated[str | int | float | bool | None, doc("Value in run a; null if it has none.")]
    b: Annotated[str | int | float | bool | None, doc("Value in run b; null if it has none.")]


class ChangedFindings(TypedDict):
    """Findings by code, phase and ranks."""

    came: Annotated[list[FindingResponse], doc("Findings that only run b has.")]
    went: Annotated[list[FindingResponse], doc("Findings that only run a has.")]
    stayed: Annotated[list[FindingResponse], doc("Findings that both have, as of run b.")]


class ComparedBuckets(TypedDict):
    """The buckets, or the units' collectives, that have the same parameters in both runs."""

    heading: Annotated[str, doc("`Buckets`, or `Units` for a fully sharded model.")]
    compared: Annotated[str, doc("How many are compared: `12 buckets have the same parameters in both runs`.")]


class Comparison(AttemptResponse):
    """Run b against run a, the run in the address."""

    headline: Annotated[str, doc("The comparison in one sentence.")]
    not_the_same_job: Annotated[str, doc("A sentence if the number of ranks or the model differs; else empty.")]
    a: Annotated[ComparedRun, doc("The run in the address.")]
    b: Annotated[ComparedRun, doc("The run in `with`.")]
    confidence: Annotated[
        float, doc("Confidence of the step's interval; all phases together have the same, and all buckets together.")
    ]
    changes: Annotated[
        list[Change],
        doc("The step first, then long steps, phases and the buckets that have the same parameters in both runs."),
    ]
    buckets: Annotated[ComparedBuckets, doc("The buckets that both runs have, in words.")]
    too_few: Annotated[str, doc("A sentence if the steps are too few to judge; else empty.")]
    limit: Annotated[Limit, doc("Judgement by `limit`.")]
    disturbed: Annotated[
        bool, doc("True if the time without a processor changed by at least half of the step's change.")
    ]
    differences: Annotated[list[Difference], doc("Settings, versions and layout that differ.")]
    findings: Annotated[ChangedFindings, doc("Findings that came, went and stayed.")]


@router.get("/compare", response_model=Comparison)
def compare_runs(
    run: RunDep,
    attempt: AttemptDep,
    caller: Reader,
    store: StoreDep,
    reports: ReportsDep,
    other: Annotated[str, Query(alias="with", pattern=f"^{RUN_ID}$", description="Run b.")],
    with_attempt: Annotated[str | None, Query(pattern=f"^{NONCE}$", description="Attempt of run b.")] = None,
    limit: Annotated[float, Query(ge=0, le=10, description="Share by which run b may be slower.")] = 0.03,
) -> Response:
    """Run b (`with`) against this run: step time by phase and bucket, settings, layout and findings.

    Each change has an interval by the block bootstrap, and the least difference that would have been seen.
    """
    b = run_of(other, caller, store)
    response = reports.compare((run.run, attempt), (b.run, attempt_of(b, store, with_attempt)), limit)
    return json_response(response)
