"""Is it alive, and can it store?"""

from __future__ import annotations

from fastapi import APIRouter

from ddpobs_server.api.deps import StoreDep
from ddpobs_server.problems import Problem

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz")
def readyz(store: StoreDep) -> dict[str, str]:
    """The database answers too."""
    try:
        store.ready()
    except Exception as error:
        raise Problem(503, "Not ready", f"the database does not answer: {type(error).__name__}") from error
    return {"status": "ready"}
