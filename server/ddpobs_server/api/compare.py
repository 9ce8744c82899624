"""The route that compares two runs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from ddpobs.wire.text import NONCE, RUN_ID
from ddpobs_server.api import compare_schemas
from ddpobs_server.api.concurrency import ConcurrencyLimitedRoute
from ddpobs_server.api.deps import AttemptDep, Reader, ReportsDep, RunDep, StoreDep, attempt_of, run_of
from ddpobs_server.api.responses import json_response

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["diagnosis"], route_class=ConcurrencyLimitedRoute)


@router.get("/compare", response_model=compare_schemas.Comparison)
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
    answer = reports.compare((run.run, attempt), (b.run, attempt_of(b, store, with_attempt)), limit)
    return json_response(answer)
