"""What a collector's work on one run costs: its ingest, each read, a scrape and each background job."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from ddpobs_server.operations.retention import RetentionJob
from ddpobs_server.settings import Settings
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from ddpobs import wire

_QUERIES: dict[str, dict[str, Any]] = {"/steps": {"points": 500}, "/spans": {"rank": 0}}


class Cost(NamedTuple):
    """Most memory besides what was in use, 0 unless it is traced, and processor time of the whole process."""

    size_bytes: int
    processor_s: float


def cost_of(action: Callable[[], Any]) -> Cost:
    """Run an action and measure it. The tests run beside others, so that time on the clock would judge the machine."""
    is_traced = tracemalloc.is_tracing()
    if is_traced:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
    began_s = time.process_time()
    action()
    took_s = time.process_time() - began_s
    return Cost(tracemalloc.get_traced_memory()[1] - before if is_traced else 0, took_s)


def reads(http: TestClient) -> list[str]:
    """Every route about one run."""
    paths = http.get("/openapi.json").json()["paths"]
    of_run = [
        path for path, operations in paths.items() if path.startswith("/api/v1/runs/{run}") and "get" in operations
    ]
    return [path for path in of_run if path.count("{") == 1]


def costs(
    http: TestClient, settings: Settings, plain: Any, run: str, statuses: Collection[int] = (201, 422, 429)
) -> dict[str, Cost]:
    """Cost of a batch of each of two ranks, and of each read and job about them; the run is then deleted.

    Args:
        http: Of the collector.
        settings: Of the collector.
        plain: The batch in its JSON form.
        run: Name of the run.
        statuses: Allowed answers to the batch.
    """
    by_name = {"ingest": cost_of(lambda: _send(http, plain, run, statuses))}
    for route in reads(http):
        query = (
            {"with": run}
            if route.endswith("/compare")
            else next((own for end, own in _QUERIES.items() if route.endswith(end)), {})
        )

        def read(route: str = route, query: Any = query) -> None:
            answer = http.get(route.replace("{run}", run), params=query)
            assert answer.status_code in (200, 404, 422), (route, answer.text)

        by_name[route] = cost_of(read)
    by_name["/metrics"] = cost_of(lambda: http.get("/metrics", params={"only": "runs"}).raise_for_status())
    by_name["/runs"] = cost_of(lambda: http.get("/api/v1/runs").raise_for_status())
    job = RetentionJob(settings, http.app.state.services.store, CollectorRegistry())  # type: ignore[attr-defined]
    by_name["retention"] = cost_of(lambda: job.run_once(time.time_ns() + 3600 * 10**9))
    assert http.get("/readyz").json() == {"status": "ready", "faulty_runs": 0}
    by_name["removal"] = cost_of(lambda: http.delete(f"/api/v1/runs/{run}").raise_for_status())
    return by_name


def _send(http: TestClient, plain: Any, run: str, statuses: Collection[int]) -> None:
    for rank in range(2):
        sent = plain | {"run": run, "rank": rank, "source": f"{rank:016x}"}
        url = f"/api/v1/runs/{run}/sources/{sent['source']}/batches/{sent['seq']}"
        answer = http.put(url, content=json.dumps(sent), headers={"Content-Type": wire.JSON})
        assert answer.status_code in statuses, answer.text
