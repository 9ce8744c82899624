"""Dependencies of the routes, as annotations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Path, Query

from ddpobs.wire.text import NONCE, RUN_ID
from ddpobs_server.reports.reports import Reports
from ddpobs_server.settings import Settings
from ddpobs_server.store import Run, Store
from ddpobs_server.web.auth import needs
from ddpobs_server.web.authenticator import Caller
from ddpobs_server.web.problems import Problem
from ddpobs_server.web.services import ServicesDep


def _store(services: ServicesDep) -> Store:
    return services.store


def _reports(services: ServicesDep) -> Reports:
    return services.reports


def _settings(services: ServicesDep) -> Settings:
    return services.settings


StoreDep = Annotated[Store, Depends(_store)]
ReportsDep = Annotated[Reports, Depends(_reports)]
SettingsDep = Annotated[Settings, Depends(_settings)]


Reader = Annotated[Caller, Depends(needs("read"))]
Labeller = Annotated[Caller, Depends(needs("ingest"))]
Admin = Annotated[Caller, Depends(needs("admin"))]


def run_of(run: str, caller: Caller, store: Store) -> Run:
    """Return a run of the caller's workspace.

    Raises:
        Problem: 404 if there is no such run.
    """
    record = store.run(caller.key(run))
    if record is None:
        raise Problem(404, "Unknown run", f"no run {run} has reported here")
    return record


def _run(
    run: Annotated[str, Path(pattern=f"^{RUN_ID}$", description="Name of the run.")], caller: Reader, store: StoreDep
) -> Run:
    return run_of(run, caller, store)


RunDep = Annotated[Run, Depends(_run)]


def attempt_of(run: Run, store: Store, attempt: str | None) -> str:
    """Return an attempt of a run, the latest for None.

    Raises:
        Problem: 404 if there is no such attempt.
    """
    if attempt is None:
        return run.attempt
    if attempt not in {record.attempt for record in store.attempts(run.run)}:
        raise Problem(404, "Unknown attempt", f"run {run.name} has no attempt {attempt}")
    return attempt


def _attempt(
    run: RunDep,
    store: StoreDep,
    attempt: Annotated[str | None, Query(pattern=f"^{NONCE}$", description="Attempt; the latest by default.")] = None,
) -> str:
    return attempt_of(run, store, attempt)


AttemptDep = Annotated[str, Depends(_attempt)]
RankQuery = Annotated[int | None, Query(ge=0, le=2**20 - 1, description="Only this rank.")]
ModuleQuery = Annotated[int | None, Query(ge=0, le=2**20 - 1, description="Only this DDP module.")]


@dataclass(frozen=True)
class StepRange:
    """Steps `first` to `last` of one attempt; None leaves that end open."""

    attempt: str
    first: int | None
    last: int | None


def _step_range(
    attempt: AttemptDep,
    first: Annotated[int | None, Query(alias="from", ge=0, le=2**62 - 1, description="First step.")] = None,
    last: Annotated[int | None, Query(alias="to", ge=0, le=2**62 - 1, description="Last step.")] = None,
) -> StepRange:
    return StepRange(attempt, first, last)


StepRangeDep = Annotated[StepRange, Depends(_step_range)]
