"""Liveness and readiness of the collector."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from typing_extensions import TypedDict

from ddpobs_server.api.fields import doc
from ddpobs_server.store import LostDatabaseError, UnavailableError
from ddpobs_server.web.problems import Problem
from ddpobs_server.web.services import ServicesDep

router = APIRouter(tags=["health"])


class Readiness(TypedDict):
    """The collector is ready."""

    status: Annotated[str, doc("`ready`.")]
    faulty_runs: Annotated[int, doc("Runs left out of metrics, lists or diagnoses by an error: see the log.")]


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process responds."""
    return {"status": "ok"}


@router.get("/readyz")
def readyz(services: ServicesDep) -> Readiness:
    """Acknowledged batches will be found: the database accepts batches, and the writer thread is alive."""
    if not services.writer.alive:
        detail = "the writer thread has ended: see the collector's log for the reason, and restart the collector"
        raise Problem(503, "Not ready", detail)
    if (reason := services.health.problem) is not None:
        raise Problem(503, "Not ready", f"{reason}: see the collector's log for the reason")
    try:
        services.store.ready()
    except LostDatabaseError as error:
        detail = "the database's file was removed, replaced or damaged: see the collector's log for the remedy"
        raise Problem(503, "Not ready", detail) from error
    except UnavailableError as error:
        detail = "too little space is free on the database's disk" if error.full else "the database does not respond"
        raise Problem(503, "Not ready", detail) from error
    except Exception as error:
        raise Problem(503, "Not ready", f"the database does not respond: {type(error).__name__}") from error
    return {"status": "ready", "faulty_runs": services.reports.faults.runs()}
