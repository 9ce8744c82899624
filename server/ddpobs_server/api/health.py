"""Is it alive, and can it store?"""

from __future__ import annotations

from fastapi import APIRouter, Request

from ddpobs_server.api.deps import StoreDep
from ddpobs_server.web.problems import Problem

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz")
def readyz(request: Request, store: StoreDep) -> dict[str, str]:
    """The database answers too, and somebody writes to it."""
    if not request.app.state.writer.alive:
        raise Problem(503, "Not ready", "the thread that writes has ended: the log says why; restart the collector")
    try:
        store.ready()
    except Exception as error:
        raise Problem(503, "Not ready", f"the database does not answer: {type(error).__name__}") from error
    return {"status": "ready"}
