"""The route of the workspaces."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response
from typing_extensions import TypedDict

from ddpobs_server.api.concurrency import ConcurrencyLimitedRoute
from ddpobs_server.api.deps import Reader
from ddpobs_server.api.fields import doc
from ddpobs_server.api.responses import json_response
from ddpobs_server.web.services import ServicesDep
from ddpobs_server.web.workspace_usage import Usage

router = APIRouter(prefix="/api/v1", tags=["workspaces"], route_class=ConcurrencyLimitedRoute)


class WorkspaceLimits(TypedDict):
    """Limits of a workspace; null is no limit."""

    share: Annotated[float, doc("Share of the collector's capacity.")]
    max_runs: Annotated[int, doc("Most runs.")]
    max_series: Annotated[int, doc("Most time series.")]
    batches_per_s: Annotated[float | None, doc("Most batches a second; null without a limit.")]
    mb_per_s: Annotated[float | None, doc("Most MB (10^6 bytes) of batches a second; null without a limit.")]
    reads_per_s: Annotated[float | None, doc("Most reads a second; null without a limit.")]
    keep_gb: Annotated[float | None, doc("Most stored data, in GB (10^9 bytes); null without a limit.")]
    keep_runs_days: Annotated[
        float | None, doc("Days after its last batch until a run is removed; null without a limit.")
    ]


class Workspace(TypedDict):
    """A workspace."""

    workspace: Annotated[str, doc("Name of the workspace.")]
    limits: Annotated[WorkspaceLimits, doc("Limits of the workspace.")]
    usage: Annotated[Usage, doc("Use of the workspace.")]


class Workspaces(TypedDict):
    """By name."""

    workspaces: Annotated[list[Workspace], doc("The workspaces.")]


@router.get("/workspaces", response_model=Workspaces)
def list_workspaces(caller: Reader, services: ServicesDep) -> Response:
    """Limits and usage of the caller's workspace. A token of the default workspace with the scope admin lists all."""
    rows = services.usages.visible_to(caller)
    return json_response(
        {
            "workspaces": [
                {"workspace": name, "limits": limits, "usage": usage} for name, (limits, usage) in rows.items()
            ]
        }
    )
