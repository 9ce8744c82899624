"""A run as OTLP; the receiver decodes it with the protocol's own classes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ddpobs_server.analysis.account.parts import PARTS

from ddpobs import Client, trackers
from ddpobs.client.client import Run
from ddpobs.errors import CollectorError
from ddpobs.trackers.goodput_names import NAMES, UNKNOWN
from ddpobs.wire import PHASES
from tests.support.integration.collectors import Reply, collector
from tests.support.otlp import receiver

BEGAN_NS = 1_700_000_000 * 10**9
ROWS = 1200
STEPS: dict[str, list[int]] = {
    "first": list(range(ROWS)),
    "last": list(range(ROWS)),
    "began_ns": [BEGAN_NS + 10 * row for row in range(ROWS)],
    "ended_ns": [BEGAN_NS + 10 * row + 10 for row in range(ROWS)],
} | {f"{phase}_median_ns": [7] * ROWS for phase in PHASES}
PARTS_NS = {"forward": 6 * 10**9, "data": 2 * 10**9}
SHARES = {"forward": 0.5, "backward": 0.125, "data": 0.25, "not_known": 0.125}
ACCOUNT = {
    "goodput": 0.75,
    "wall_ns": 8 * 10**9,
    "attempt": "a" * 16,
    "parts": [{"part": part, "share": share} for part, share in SHARES.items()],
    "attempts": [{"attempt": "a" * 16, "ranks": [{"rank": 1, "parts_ns": PARTS_NS}]}],
}
DOCUMENTS: dict[str, Any] = {
    "r": {"attempt": "a" * 16, "world_size": 2},
    "diagnostics": {"findings": []},
    "account": ACCOUNT,
    "steps": {"columns": STEPS, "next": None},
}


def answer(path: str) -> Reply:
    return 200, {}, json.dumps(DOCUMENTS[path.partition("?")[0].rpartition("/")[2]]).encode()


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with collector(answer) as server:
        yield Client(server.url).run("r")


def values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def test_run_and_rank_are_attributes_of_the_resource_beside_the_names_of_nvidia(run: Run) -> None:
    with receiver() as (endpoint, requests):
        trackers.otlp(run, endpoint, ranks=[1], headers={"x-key": "s3cret"})
    assert {key for key, _ in requests} == {"s3cret"}
    parts = [part for _, each in requests if hasattr(each, "resource_spans") for part in each.resource_spans]
    spans = [span for part in parts for scope in part.scope_spans for span in scope.spans]
    assert len(spans) == ROWS + 1
    expected = {"ddpobs.run": "r", "ddpobs.attempt": "a" * 16, "ddpobs.rank": 1}
    expected |= {"nv.dl.run.uuid": "a" * 16, "nv.dl.rank": 1, "nv.dl.world_size": 2, "nv.dl.role": "trainer"}
    for part in parts:
        assert expected.items() <= values(part.resource.attributes).items()
    metrics = [part for _, each in requests if hasattr(each, "resource_metrics") for part in each.resource_metrics]
    of_run, of_rank = (values(part.resource.attributes) for part in metrics)
    assert "nv.dl.rank" not in of_run
    assert expected.items() <= of_rank.items()


def test_goodput_and_badput_have_the_names_of_google(run: Run) -> None:
    with receiver() as (endpoint, requests):
        trackers.otlp(run, endpoint, ranks=[1])
        trackers.otlp(None, endpoint)
    parts = [part for _, each in requests if hasattr(each, "resource_metrics") for part in each.resource_metrics]
    found = {
        (metric.name, *values(point.attributes).values()): point.as_double
        for part in parts
        for scope in part.scope_metrics
        for metric in scope.metrics
        for point in metric.gauge.data_points
    }
    assert found == {
        ("ddpobs.goodput",): 0.75,
        ("goodput_time", "TOTAL"): 5.0,
        ("badput_time", "DATA_LOADING_SYNC"): 2.0,
        ("ddpobs.rank.time", "forward"): 6.0,
        ("ddpobs.rank.time", "data"): 2.0,
    }


def test_a_receiver_that_refuses_is_an_error(run: Run) -> None:
    with receiver(400) as (endpoint, _), pytest.raises(CollectorError, match="does not accept OTLP"):
        trackers.otlp(run, endpoint)


def test_every_part_of_the_account_has_a_name_and_a_place_in_the_table() -> None:
    assert NAMES.keys() | set(UNKNOWN) == set(PARTS)
    page = (Path(__file__).parents[2] / "docs" / "notebook.md").read_text()
    for part, name in NAMES.items():
        if name != "TOTAL":
            assert re.search(rf"^\| `{name}` \|.*`{part}`", page, re.MULTILINE), part
