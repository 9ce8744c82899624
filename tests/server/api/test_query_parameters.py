"""Parameters that a route does not know are refused, and the routes about parts of a run."""

from __future__ import annotations

import httpx
import pytest
from ddpobs_server.app import create_app
from ddpobs_server.settings import Settings

from benchmarks.rig.collector import Collector
from tests.support.server.batches import assert_problem, batch, get, put, source_of, steps

API = "/api/v1"


def routes() -> list[tuple[str, str]]:
    document = create_app(Settings()).openapi()["paths"]
    return [(method, path) for path, operations in document.items() for method in operations]


@pytest.mark.parametrize(("method", "path"), routes())
def test_every_route_refuses_a_parameter_that_it_does_not_know(
    on_sqlite: Collector, run: str, method: str, path: str
) -> None:
    put(on_sqlite.url, batch(run, steps=steps(0, 4)))
    address = on_sqlite.url + path.format(run=run, source=source_of(0), seq=7, figure="account")
    answer = httpx.request(method, address, params={"form": "10"}, content=b"" if method == "put" else None)
    assert assert_problem(answer, 422)["title"] == "Unknown parameter"
    assert "form" in answer.json()["detail"]
    assert answer.json()["field"] == "query.form"


def test_the_refusal_names_the_known_parameters(on_sqlite: Collector, run: str) -> None:
    put(on_sqlite.url, batch(run, steps=steps(0, 4)))
    answer = httpx.get(f"{on_sqlite.url}{API}/runs/{run}/diagnostics", params={"form": "1", "to": "3"})
    assert answer.json()["detail"] == "query: expected one of attempt, from, to, got form"


def test_pages_open_with_any_parameter(on_sqlite: Collector) -> None:
    assert httpx.get(f"{on_sqlite.url}/?from_mail=1").status_code == 200
    assert httpx.get(f"{on_sqlite.url}/runs/x?attempt=1").status_code == 200


def test_steps_in_bins_have_the_least_the_median_and_the_most_of_each_rank(on_sqlite: Collector, run: str) -> None:
    for rank in range(2):
        put(on_sqlite.url, batch(run, rank=rank, steps=steps(0, 100)))
    columns = get(on_sqlite.url, f"/runs/{run}/steps", points=4)["columns"]
    assert columns["rank"] == [0, 1] * 4
    assert columns["first"] == [0, 0, 25, 25, 50, 50, 75, 75]
    assert columns["last"] == [24, 24, 49, 49, 74, 74, 99, 99]
    assert columns["steps"] == [25] * 8
    for kind in ("min", "median", "max"):
        assert columns[f"wall_{kind}_ns"] == [100_000_000] * 8
        assert columns[f"backward_{kind}_ns"] == [40_000_000] * 8
    assert columns["began_ns"][0] == 10**18
    over = get(on_sqlite.url, f"/runs/{run}/steps", points=4, mean=True)["columns"]
    assert "rank" not in over
    assert over["steps"] == [50] * 4
    one = get(on_sqlite.url, f"/runs/{run}/steps", **{"points": 2, "rank": 1, "from": 50})["columns"]
    assert (one["rank"], one["first"]) == ([1, 1], [50, 75])


@pytest.mark.parametrize("points", ["0", "10001", "x"])
def test_a_number_of_points_out_of_range_is_refused(on_sqlite: Collector, run: str, points: str) -> None:
    put(on_sqlite.url, batch(run, steps=steps(0, 4)))
    answer = httpx.get(f"{on_sqlite.url}{API}/runs/{run}/steps", params={"points": points})
    assert answer.status_code == 422
