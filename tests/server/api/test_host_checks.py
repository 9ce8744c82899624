"""Checks of hosts are stored, and the median of the latest ones is returned to the next check."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from ddpobs_server.store import Store
from ddpobs_server.store.writing import host_checks

from benchmarks.rig.collector import collector
from tests.support.server.batches import assert_problem


def of(host: str = "node1", ranks: int = 2, **rates: float) -> dict[str, Any]:
    return {"host": host, "ranks": ranks, "rates": rates or {"disk writes": 1.0}}


def test_the_medians_of_earlier_checks_are_returned_by_host_and_number_of_ranks(tmp_path: Any) -> None:
    with collector(tmp_path) as running:

        def post(*hosts: Any, device: str = "CPUs") -> Any:
            body = {"device": device, "hosts": hosts}
            return httpx.post(f"{running.url}/api/v1/host-checks", json=body).raise_for_status().json()["earlier"]

        assert post(of(copies=10.0), of("node2", copies=5.0)) == []
        for rate in (30.0, 20.0):
            post(of(copies=rate, disk=1.0))
        assert post(of(copies=1.0), of(ranks=4), of("node3")) == [
            {"host": "node1", "ranks": 2, "checks": 3, "rates": {"copies": 20.0, "disk": 1.0}}
        ]
        assert post(of(copies=1.0), device="GPUs") == []


@pytest.mark.parametrize(
    "body",
    [
        {"device": "CPUs", "hosts": []},
        {"device": "CPUs"},
        {"device": "CPUs", "hosts": [of() | {"rates": {"disk": -1}}]},
        {"device": "CPUs", "hosts": [of() | {"rates": {"disk": "fast"}}]},
        {"device": "C" * 17, "hosts": [of()]},
        {"device": "CPUs", "hosts": [of("n" * 256)]},
        {"device": "CPUs", "hosts": [of(ranks=0)]},
        {"device": "CPUs", "hosts": [of()], "more": 1},
    ],
)
def test_a_malformed_check_is_refused(url: str, body: Any) -> None:
    assert_problem(httpx.post(f"{url}/api/v1/host-checks", json=body), 422)


def test_a_host_keeps_its_latest_checks_and_a_workspace_its_latest_hosts(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_checks, "_MAX_ROWS", 2)

    def add(host: str, rate: float, now_ns: int, workspace: str = "default") -> list[float]:
        earlier = store.add_host_check(workspace, "CPUs", {(host, 1): {"disk": rate}}, now_ns)
        return [rates["disk"] for rates in earlier.get((host, 1), [])]

    for number in range(20):
        assert len(add("a", float(number), number)) == min(number, 16)
    assert add("a", 20.0, 20) == [float(number) for number in range(4, 20)]
    assert add("a", 1.0, 21, "other") == []
    for number, host in enumerate(("b", "c"), 30):
        add(host, 1.0, number)
    assert add("a", 1.0, 40) == []
