"""The route of the workspaces."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ddpobs_server.api import schemas
from ddpobs_server.api.concurrency import ConcurrencyLimitedRoute
from ddpobs_server.api.deps import Reader
from ddpobs_server.api.responses import json_response
from ddpobs_server.web.workspace_usage import WorkspaceUsages

router = APIRouter(prefix="/api/v1", tags=["workspaces"], route_class=ConcurrencyLimitedRoute)


@router.get("/workspaces", response_model=schemas.Workspaces)
def list_workspaces(caller: Reader, request: Request) -> Response:
    """Limits and usage of the caller's workspace. A token of the default workspace with the scope admin lists all."""
    usages: WorkspaceUsages = request.app.state.workspace_usage
    rows = usages.visible_to(caller)
    return json_response(
        {
            "workspaces": [
                {"workspace": name, "limits": limits, "usage": usage} for name, (limits, usage) in rows.items()
            ]
        }
    )
