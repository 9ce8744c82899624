"""`ddpobs.Client` against small HTTP servers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ddpobs import Client
from ddpobs.client.client import Account, Findings
from ddpobs.client.columns import Columns
from ddpobs.errors import CollectorError, ConfigError
from tests.support.integration.collectors import Reply, absent, collector

PAGES: dict[str, dict[str, Any]] = {
    "/api/v1/runs/r/spans?rank=1&from=0&to=9": {"columns": {"step": [0, 1], "rank": [1, 1]}, "next": 2},
    "/api/v1/runs/r/spans?rank=1&from=2&to=9": {"columns": {"step": [2], "rank": [1]}, "next": None},
}


def answer(path: str) -> Reply:
    return 200, {}, json.dumps(PAGES[path]).encode()


def test_pages_are_joined_to_arrays() -> None:
    with collector(answer) as server:
        spans = Client(server.url).run("r").spans(rank=1, last=9)
    assert list(spans) == ["step", "rank"]
    assert (spans.rows, spans["step"].tolist()) == (3, [0, 1, 2])
    assert spans["step"].dtype == np.int64


def test_the_token_of_the_argument_is_sent() -> None:
    with collector(answer) as server:
        list(Client(server.url, token="secret").run("r").pages("spans", 1, 0, 9))
    assert [headers["Authorization"] for headers in server.headers] == ["Bearer secret"] * 2


def test_a_collector_that_is_not_there_and_a_wrong_name_raise() -> None:
    url = absent()
    with pytest.raises(CollectorError, match="is this the collector") as caught:
        Client(url).run("r").findings()
    assert caught.value.url == f"{url}/api/v1/runs/r/diagnostics"
    with pytest.raises(ConfigError):
        Client(url).run("a/b")


def test_the_collector_of_the_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPOBS_TELEMETRY", "http://c:1")
    assert Client().run("r").address == "http://c:1/runs/r"
    monkeypatch.delenv("DDPOBS_TELEMETRY")
    assert Client().run("r").address == "http://127.0.0.1:8321/runs/r"


def test_columns_become_an_arrow_table() -> None:
    table = Columns({"step": [1, 2], "rank": [0, 0]}).to_arrow()
    assert table.to_pydict() == {"step": [1, 2], "rank": [0, 0]}
    assert table.schema.field("step").type == pa.int64()


def test_columns_become_data_frames_with_null_for_unknown_values() -> None:
    columns = Columns({"step": [1, 2], "own_ns": [None, 2**53 + 1]})
    frame = columns.to_pandas()
    assert frame["own_ns"].isna().tolist() == [True, False]
    assert (frame["own_ns"][1], frame["step"].tolist()) == (2**53 + 1, [1, 2])
    assert columns.to_polars().to_dict(as_series=False) == {"step": [1, 2], "own_ns": [None, 2**53 + 1]}
    assert columns.to_arrow().to_pydict() == {"step": [1, 2], "own_ns": [None, 2**53 + 1]}


def test_unknown_values_are_masked_on_joined_pages() -> None:
    pages = {0: {"columns": {"own_ns": [None, 5]}, "next": 2}, 2: {"columns": {"own_ns": [7]}, "next": None}}
    with collector(lambda path: (200, {}, json.dumps(pages[int(path.rpartition("=")[2])]).encode())) as server:
        own_ns = Client(server.url).run("r").steps()["own_ns"]
    assert (own_ns.tolist(), own_ns.mean()) == ([None, 5, 7], 6)
    assert own_ns.dtype == np.int64


def test_a_notebook_shows_escaped_tables_of_the_first_rows() -> None:
    page = Columns({"step": list(range(40))})._repr_html_()
    assert page.count("<tr>") == 1 + 10
    assert page.endswith("<p>40 rows</p>")
    finding = {"severity": "info", "verdict": "<script>", "remedy": "a & b", "gain": None}
    assert Findings([finding])._repr_html_() == "<p><b>info: &lt;script&gt;</b><br>do: a &amp; b</p>"
    assert Findings()._repr_html_() == "<p>no findings</p>"
    account = Account(parts=[{"title": "forward", "share": 0.5}, {"title": "never", "share": 0.0}])
    assert account._repr_html_().count("<tr>") == 2
