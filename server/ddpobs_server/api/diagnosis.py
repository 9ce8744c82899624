"""Who is slow, why, and what would help."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from ddpobs_server.api.deps import AttemptDep, FromQuery, ReportsDep, RunDep, ToQuery

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["diagnosis"])


@router.get("/stragglers")
def get_stragglers(
    run: RunDep, attempt: AttemptDep, reports: ReportsDep, first: FromQuery = None, last: ToQuery = None
) -> dict[str, Any]:
    """Own time of each rank in each step, who was last, and by how much."""
    return reports.stragglers(run.run, attempt, first, last) | {"run": run.name}


@router.get("/diagnostics")
def get_diagnostics(run: RunDep, attempt: AttemptDep, reports: ReportsDep) -> dict[str, Any]:
    """Findings with evidence, remedy and gain; `missing` says what could not be judged, and why."""
    return reports.diagnostics(run.run, attempt) | {"run": run.name}


@router.get("/trace")
def get_trace(
    run: RunDep, attempt: AttemptDep, reports: ReportsDep, first: FromQuery = None, last: ToQuery = None
) -> dict[str, Any]:
    """Steps as a Chrome trace, all ranks on one clock: open it in Perfetto or chrome://tracing."""
    return reports.trace(run.run, attempt, first, last)
