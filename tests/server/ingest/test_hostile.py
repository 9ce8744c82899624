"""Hostile clients: nothing they send is executed, trusted, or able to harm another run."""

from __future__ import annotations

import base64
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import zstandard
from ddpobs_server.app import create_app
from ddpobs_server.figures.registry import NAMES
from ddpobs_server.settings import Settings
from fastapi.testclient import TestClient
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from benchmarks.rig import databases, patience
from benchmarks.rig.collector import Collector, collector
from ddpobs import wire
from ddpobs.config import TelemetryConfig
from ddpobs.errors import ConfigError
from tests.support.server.batches import ATTEMPT, assert_problem, batch, get, layout, path, put, spans, steps
from tests.support.wire_batches import GOLDEN

READS = ["", "/ranks", "/layout", "/steps", "/spans", "/buckets", "/unused", "/stragglers", "/diagnostics", "/trace"]
READS += ["/account", "/report.html", *(f"/figures/{name}" for name in NAMES)]
LONGEST = np.full(3000, wire.LONGEST_NS)
NONE = np.zeros(3000, np.int64)
NO_PHASE = {f"{phase}_ns": NONE for phase in wire.PHASES}
ABSURD: dict[str, dict[str, Any]] = {
    "steps that take no time": {"steps": steps(0, 3000, start_ns=NONE, end_ns=NONE, **NO_PHASE)},
    "steps that last a month": {
        "steps": steps(0, 3000, start_ns=NONE, end_ns=LONGEST, **NO_PHASE | {"data_ns": LONGEST})
    },
    "buckets that no layout has": {"layouts": [layout()], "spans": spans(0, 50, bucket=np.arange(100) + 9_900)},
    "spans without steps that take no time": {
        "spans": spans(0, 50, **dict.fromkeys(("ready_ns", "launched_ns", "done_ns"), np.zeros(100, np.int64)))
    },
    "spans that last two months": {"spans": spans(0, 1500, ready_ns=-LONGEST, launched_ns=-LONGEST, done_ns=LONGEST)},
    "counts without end": {"emitted": 2**48, "dropped": 2**48, "world_size": 16_384},
}


@pytest.mark.parametrize("case", ABSURD)
def test_absurd_values_affect_only_their_own_run(shared: Collector, run: str, case: str) -> None:
    for rank in range(2):
        for seq in range(2):
            answer = put(shared.url, batch(run, seq=seq, rank=rank, **{"world_size": 2} | ABSURD[case]))
            assert answer.status_code in (201, 422), answer.text
    for read in READS:
        assert httpx.get(f"{shared.url}/api/v1/runs/{run}{read}").status_code == 200, read
    assert httpx.get(f"{shared.url}/metrics").status_code == 200
    httpx.delete(f"{shared.url}/api/v1/runs/{run}")


NASTY = (
    "\x1b[31m\r\nSet-Cookie: a=b\n# HELP owned x\nowned 1\n"
    "\"'\\`<script>alert(1)</script>{{7*7}}%s\u202e'; DROP TABLE runs; --\0\x85\u2028\ufeff\uffff\\"
)


def nasty_batch(run: str) -> wire.Batch:
    bucket = wire.Bucket(size_bytes=4, dtype=NASTY, parameters=[wire.Parameter(name=NASTY, size=1)])
    return batch(
        run,
        hello=wire.Hello(
            host=NASTY, pid=1, device=NASTY, backend=NASTY, versions={"torch": NASTY}, settings={NASTY: NASTY}
        ),
        layouts=[wire.Layout(module=0, name=NASTY, revision=0, comm=NASTY, buckets=[bucket])],
        steps=steps(0, 2),
        unused=[wire.Unused(step=0, module=0, locally=[NASTY], globally=[NASTY])],
        events=[
            wire.Event(kind=NASTY, at_ns=0, detail={NASTY: NASTY}),
            wire.Event(kind="sampler_without_set_epoch", at_ns=0, detail={"sampler": NASTY, "dataset": NASTY}),
        ],
    )


def test_a_nasty_name_is_returned_unchanged(shared: Collector, run: str) -> None:
    assert put(shared.url, nasty_batch(run)).status_code == 201
    assert get(shared.url, f"/runs/{run}")["modules"] == [{"module": 0, "name": NASTY}]
    (rank,) = get(shared.url, f"/runs/{run}/ranks")["ranks"]
    assert (rank["host"], rank["device"], rank["backend"]) == (NASTY, NASTY, NASTY)
    assert get(shared.url, f"/runs/{run}/layout")["layouts"][0]["buckets"][0]["parameters"][0]["name"] == NASTY
    assert get(shared.url, f"/runs/{run}/unused")["unused"][0]["locally"] == [NASTY]
    findings = get(shared.url, f"/runs/{run}/diagnostics")["findings"]
    assert NASTY in next(finding["title"] for finding in findings if finding["code"] == "epoch-not-set")


@pytest.mark.parametrize(
    ("accept", "parse"), [("text/plain", prometheus), ("application/openmetrics-text", openmetrics)]
)
def test_a_nasty_name_stays_one_label_of_one_metric(shared: Collector, run: str, accept: str, parse: Any) -> None:
    put(shared.url, nasty_batch(run))
    families = list(parse(httpx.get(f"{shared.url}/metrics", headers={"Accept": accept}).text))
    assert "owned" not in {family.name for family in families}
    (info,) = [
        sample for f in families for sample in f.samples if f.name == "ddpobs_run_info" and sample.labels["run"] == run
    ]
    assert (info.labels["backend"], info.labels["device"], info.labels["torch"]) == (NASTY, NASTY, NASTY)


def test_a_nasty_name_starts_no_line_of_the_log(shared: Collector, run: str) -> None:
    put(shared.url, nasty_batch(run))
    put(shared.url, msgspec.structs.replace(nasty_batch(run), seq=1, version=wire.VERSION + 1))
    put(shared.url, batch(run, seq=2), **{"Content-Encoding": "\x1b[31mowned"})
    httpx.get(
        f"{shared.url}/api/v1/runs/{run}%0Aowned/steps?attempt=%0Aowned",
        headers={"Authorization": "Bearer \x1b[31mowned"},
    )
    log = shared.log.read_text()
    assert not [line for line in log.splitlines() if line.startswith(("owned", "Set-Cookie", "# HELP"))]
    assert "\x1b" not in log


@pytest.mark.parametrize(
    "text",
    ["", "x", "1", "1/", "-1/a", "1/\0", "1/a b", "9" * 19 + "/a", "9" * 300 + "/a", "\u00bd/a", "1/" + "a" * 129],
)
def test_a_tampered_cursor_is_refused(shared: Collector, text: str) -> None:
    cursor = base64.urlsafe_b64encode(text.encode()).decode()
    assert assert_problem(httpx.get(f"{shared.url}/api/v1/runs", params={"cursor": cursor}), 422)["field"] == "cursor"


def test_a_run_that_reports_during_paging_is_not_missed(shared: Collector, run: str) -> None:
    names = [f"{run[:100]}-{index}" for index in range(5)]
    for name in names:
        put(shared.url, batch(name))
    listed: list[str] = []
    cursor: dict[str, str] = {}
    for seq in range(1, 1000):
        page = get(shared.url, "/runs", limit=2, **cursor)
        listed += [run_json["run"] for run_json in page["runs"]]
        put(shared.url, batch(names[0], seq=seq))
        if page["next"] is None:
            break
        cursor = {"cursor": page["next"]}
    assert [name for name in listed if name in names] == names[::-1]


def test_a_run_deleted_and_sent_again_is_not_served_from_the_cache(shared: Collector, run: str) -> None:
    put(shared.url, batch(run, steps=steps(0, 2)))
    assert get(shared.url, f"/runs/{run}/diagnostics")["steps_seen"] == 2
    httpx.delete(f"{shared.url}/api/v1/runs/{run}")
    put(shared.url, batch(run, attempt="b" * 16, source="b" * 16, steps=steps(0, 5)))
    assert get(shared.url, f"/runs/{run}/diagnostics")["steps_seen"] == 5


def test_a_nonce_with_a_line_end_is_refused(shared: Collector, run: str) -> None:
    assert assert_problem(put(shared.url, batch(run, attempt=ATTEMPT + "\n")), 422)["field"] == "attempt"


@pytest.mark.parametrize(
    "where",
    [
        *("/static/..%2f..%2f__init__.py", "/static/%2e%2e/%2e%2e/app.py", "/swagger/..%2f..%2f..%2fetc%2fpasswd"),
        *("/api/v1/runs/..%2f..%2fetc%2fpasswd", "/api/v1/runs/vision%2frun/steps", "/api/v1/runs/%00/steps"),
        *("/api/v1/runs/'%20OR%201=1%20--/steps", "/api/v1/runs/a%0a", "/api/v1/runs/{{7*7}}"),
    ],
)
def test_a_path_reaches_only_runs_and_files_of_the_page(shared: Collector, where: str) -> None:
    assert httpx.get(shared.url + where).status_code in (404, 422)


@pytest.mark.parametrize("run_id", [".", ".."])
def test_a_run_id_of_dots_is_refused_by_collector_and_client(shared: Collector, run_id: str) -> None:
    payload = batch(run_id)
    connection = HTTPConnection(shared.url.removeprefix("http://"), timeout=patience.HANG_S)
    connection.request("PUT", path(payload), wire.encode(payload), {"Content-Type": wire.MSGPACK})
    assert connection.getresponse().status == 422
    connection.close()
    with pytest.raises(ConfigError, match="neither"):
        TelemetryConfig(run=run_id)
    assert TelemetryConfig(run="...").run == "..."


@pytest.mark.parametrize(
    "where", ["/", "/docs", "/api/v1/runs", "/api/v1/runs/nobody", "/api/v1/runs?limit=x", "/nothing"]
)
def test_every_response_has_the_security_headers(shared: Collector, where: str) -> None:
    answer = httpx.get(shared.url + where, headers={"Origin": "https://elsewhere.example"})
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_an_internal_error_has_the_security_headers_too(tmp_path: Path) -> None:
    app = create_app(Settings(database_url=databases.sqlite(tmp_path)))
    app.add_api_route("/broken", lambda: 1 // 0)
    answer: Any = TestClient(app, raise_server_exceptions=False).get("/broken")
    assert_problem(answer, 500)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_no_response_allows_other_sites_to_write(shared: Collector) -> None:
    preflight = {"Origin": "https://elsewhere.example", "Access-Control-Request-Method": "DELETE"}
    answer = httpx.options(f"{shared.url}/api/v1/runs/a", headers=preflight)
    assert answer.status_code == 405
    assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("host", ["rebound.example", "127.0.0.1.rebound.example:8321", "localhost.", "[::1", "a.b"])
def test_without_tokens_a_foreign_host_name_is_refused(shared: Collector, host: str) -> None:
    assert_problem(httpx.get(f"{shared.url}/api/v1/runs", headers={"Host": host}), 421)


@pytest.mark.parametrize(
    "host", ["localhost:8321", "127.0.0.1", "[::1]:8321", "collector:80", "a.localhost", "host.docker.internal"]
)
def test_without_tokens_local_host_names_are_accepted(shared: Collector, host: str) -> None:
    assert httpx.get(f"{shared.url}/api/v1/runs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("golden", sorted(GOLDEN.glob("batch-*.zst")), ids=lambda golden: golden.stem)
def test_a_batch_of_an_older_client_is_stored(tmp_path: Path, golden: Any) -> None:
    body = golden.read_bytes()
    payload = wire.decode(zstandard.decompress(body))
    headers = {"Content-Type": wire.MSGPACK, "Content-Encoding": "zstd"}
    with collector(tmp_path) as running:
        assert httpx.put(running.url + path(payload), content=body, headers=headers).status_code == 201
        assert payload.steps is not None
        stored = get(running.url, f"/runs/{payload.run}/steps")["columns"]["own_ns"]
        assert stored == [None if value == wire.UNKNOWN else value for value in payload.steps.own_ns.tolist()]
        assert get(running.url, f"/runs/{payload.run}/layout")["layouts"][0]["name"] == "model"


def with_unknown_fields(value: Any) -> Any:
    """Add an unknown field to every object, as a newer version might send."""
    if isinstance(value, dict) and value:  # An empty mapping has keys of the client, not fields.
        return {key: with_unknown_fields(inner) for key, inner in value.items()} | {"invented_later": {"by": [1, "x"]}}
    return [with_unknown_fields(inner) for inner in value] if isinstance(value, list) else value


def test_unknown_fields_are_ignored_and_a_newer_wire_version_is_refused(shared: Collector, run: str) -> None:
    payload = batch(
        run, steps=steps(0, 3), spans=spans(0, 3), layouts=[layout()], pulse=wire.Pulse(at_ns=1, phase="data", step=2)
    )
    body = msgspec.json.encode(with_unknown_fields(msgspec.json.decode(wire.encode_json(payload))))
    headers = {"Content-Type": wire.JSON}
    assert httpx.put(shared.url + path(payload), content=body, headers=headers).status_code == 201
    assert get(shared.url, f"/runs/{run}/steps")["columns"]["step"] == [0, 1, 2]
    refused = put(shared.url, batch(run, seq=1, version=wire.VERSION + 1))
    assert "upgrade the collector" in assert_problem(refused, 422)["detail"]
