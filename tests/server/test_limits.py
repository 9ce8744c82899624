"""Each limit has a setting and an answer, and one client that reaches it is no harm to the others."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import numpy as np
import pytest
import uvicorn
import zstandard
from ddpobs_server import heads, problems
from ddpobs_server.api import pieces, turns
from ddpobs_server.api.turns import InTurn
from ddpobs_server.app import create_app
from ddpobs_server.settings import Settings
from fastapi import APIRouter, FastAPI, Response
from prometheus_client import CollectorRegistry

from ddpobs import wire
from ddpobs.config import TelemetryConfig
from ddpobs.sender import Outcome, Sender
from tests import databases
from tests.collector import Collector, collector
from tests.server.batches import assert_problem, batch, get, layout, path, put, source_of, spans, steps

LIMITS = {
    "max_body_mb": 0.2,
    "max_batch_mb": 1,
    "max_under_way_mb": 0.05,
    "upload_timeout_s": 2,
    "max_records": 50,
    "max_names": 20,
    "max_name_length": 40,
    "max_layouts": 3,
    "max_ranks": 8,
    "max_sources": 3,
}
MONTHS = 2**53
"""A hundred days, in ns."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    with collector(tmp_path_factory.mktemp("small"), **LIMITS) as running:
        yield running
    assert "Traceback" not in running.log.read_text()


@pytest.fixture(scope="module")
def unhurried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    """As small, but an upload may take its time."""
    with collector(tmp_path_factory.mktemp("unhurried"), **LIMITS | {"upload_timeout_s": 60}) as running:
        yield running


def named(count: int = 1, length: int = 1) -> list[wire.Unused]:
    names = [str(index).ljust(length, "n") for index in range(count)]
    return [wire.Unused(step=0, module=0, locally=names, globally=[])]


def of_layout(**changed: Any) -> wire.Layout:
    return msgspec.structs.replace(layout(), **changed)


TOO_MUCH: dict[str, tuple[dict[str, Any], int]] = {
    "MAX_RANKS": ({"world_size": 9}, 422),
    "MAX_RECORDS": ({"steps": steps(0, 51)}, 413),
    "MAX_RECORDS of spans": ({"spans": spans(0, 26)}, 413),
    "MAX_RECORDS of events": ({"events": [wire.Event(kind="e", at_ns=0)] * 51}, 413),
    "MAX_RECORDS of readiness": (
        {"readiness": [wire.Readiness(step=0, module=0, revision=0, ready_ns=np.arange(51))]},
        413,
    ),
    "MAX_NAMES": ({"unused": named(21)}, 413),
    "MAX_NAME_LENGTH": ({"unused": named(1, 41)}, 422),
    "MAX_NAME_LENGTH of details": ({"events": [wire.Event(kind="e", at_ns=0, detail={"a": "n" * 41})]}, 422),
    "MAX_LAYOUTS of a process": ({"layouts": [of_layout(module=3)]}, 422),
    "MAX_LAYOUTS of a module": ({"layouts": [of_layout(revision=3)]}, 422),
    "MAX_LAYOUTS of spans": ({"spans": spans(0, 1, module=np.array([0, 3]))}, 422),
}


@pytest.mark.parametrize("limit", TOO_MUCH)
def test_a_batch_beyond_a_limit_is_refused_and_the_setting_named(small: Collector, run: str, limit: str) -> None:
    fields, status = TOO_MUCH[limit]
    document = assert_problem(put(small.url, batch(run, **fields)), status)
    assert f"DDPOBS_SERVER_{limit.split(' ', maxsplit=1)[0]}" in document["detail"]


def test_a_batch_at_its_limits_is_taken(small: Collector, run: str) -> None:
    full = batch(run, world_size=8, steps=steps(0, 49), unused=named(17, 40), layouts=[])
    assert put(small.url, full).status_code == 201
    assert put(small.url, batch(run, seq=1, layouts=[of_layout(module=2, revision=2)])).status_code == 201


def test_a_run_takes_so_many_sources_and_those_it_has_may_go_on(small: Collector, run: str) -> None:
    answers = [put(small.url, batch(run, rank=rank, world_size=4)) for rank in range(4)]
    assert [answer.status_code for answer in answers] == [201, 201, 201, 429]
    assert "DDPOBS_SERVER_MAX_SOURCES" in assert_problem(answers[3], 429)["detail"]
    assert answers[3].headers["retry-after"] == "60"
    assert put(small.url, batch(run, seq=1, rank=2, world_size=4)).status_code == 201


def test_a_workspace_takes_so_many_runs_and_another_one_after_a_deletion(tmp_path: Path) -> None:
    with collector(tmp_path, max_runs=2) as running:
        assert [put(running.url, batch(name)).status_code for name in ("a", "b", "c")] == [201, 201, 429]
        assert put(running.url, batch("a", rank=1)).status_code == 201
        httpx.delete(f"{running.url}/api/v1/runs/a")
        assert put(running.url, batch("c")).status_code == 201


@contextmanager
def upload(url: str, size: int, target: str = path(batch("slow"))) -> Iterator[socket.socket]:
    """A PUT whose headers promise a body of `size` bytes."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), 60) as client:
        head = f"PUT {target} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: {wire.JSON}\r\n"
        client.sendall(f"{head}Content-Length: {size}\r\n\r\n".encode())
        yield client


def answered(client: socket.socket) -> str:
    """Everything until the collector closes the connection."""
    return b"".join(iter(lambda: client.recv(65536), b"")).decode()


def test_an_upload_that_does_not_end_is_ended(small: Collector) -> None:
    with upload(small.url, 1000) as client:
        client.sendall(b"{")
        answer = answered(client)
    assert answer.startswith("HTTP/1.1 408 ")
    assert "DDPOBS_SERVER_UPLOAD_TIMEOUT_S" in answer


def test_a_body_announced_as_too_large_is_refused_before_it_comes(small: Collector) -> None:
    with upload(small.url, 10**12) as client:
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_a_length_with_endless_zeros_before_it_is_what_it_says(small: Collector, run: str) -> None:
    sent = batch(run)
    body = wire.encode_json(sent)
    address = urlsplit(small.url)
    with socket.create_connection((address.hostname, address.port), 60) as client:
        head = f"PUT {path(sent)} HTTP/1.1\r\nHost: here\r\nContent-Type: {wire.JSON}\r\n"
        client.sendall(f"{head}Content-Length: {str(len(body)).zfill(5000)}\r\n\r\n".encode() + body)
        assert client.recv(65536).startswith(b"HTTP/1.1 201 ")


@pytest.mark.parametrize("announced", [True, False])
def test_the_sender_learns_that_a_body_is_too_large(small: Collector, announced: bool) -> None:
    body: Any = bytes(5_000_000) if announced else iter([bytes(50_000)] * 100)
    sender = Sender(TelemetryConfig(collector=small.url))
    answer = sender.send("large", source_of(0), 0, body)
    sender.close()
    assert (answer.outcome, "MAX_BODY_MB" in answer.detail) == (Outcome.REFUSED, True)


def test_a_batch_too_large_when_decompressed_is_refused_whether_it_tells_or_not(small: Collector) -> None:
    telling = zstandard.compress(bytes(100_000_000))
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100_000_000))
    headers = {"Content-Type": wire.MSGPACK, "Content-Encoding": "zstd"}
    for bomb in (telling, silent):
        answer = httpx.put(small.url + path(batch("bomb")), content=bomb, headers=headers, timeout=60)
        assert "DDPOBS_SERVER_MAX_BATCH_MB" in assert_problem(answer, 413)["detail"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read memory from")
def test_many_bombs_at_once_take_no_memory(small: Collector, run: str) -> None:
    compressor = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    bomb = b"".join(compressor.compress(bytes(10**7)) for _ in range(50)) + compressor.flush()
    headers = {"Content-Type": wire.MSGPACK, "Content-Encoding": "zstd"}
    before = peak_kb(small)
    with ThreadPoolExecutor(8) as pool:
        target = small.url + path(batch(run))
        answers = pool.map(lambda _: httpx.put(target, content=bomb, headers=headers, timeout=60), range(24))
        assert {answer.status_code for answer in answers} <= {413, 503}
    assert peak_kb(small) - before < 200_000


def peak_kb(running: Collector) -> int:
    """The most memory that the collector ever had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{running.process.pid}/status").read_text())
    assert found is not None
    return int(found[1])


def test_many_bodies_at_once_are_told_to_come_back(unhurried: Collector, run: str) -> None:
    sent = batch(run)
    body = wire.encode_json(sent) + b" " * 40_000
    other = batch(run, seq=1)
    with upload(unhurried.url, len(body), path(sent)) as client:
        client.sendall(body[:-1])
        until(lambda: under_way(unhurried.url) >= 40_000)
        busy = httpx.put(
            unhurried.url + path(other),
            content=wire.encode_json(other) + b" " * 20_000,
            headers={"Content-Type": wire.JSON},
        )
        client.sendall(body[-1:])
        assert client.recv(65536).startswith(b"HTTP/1.1 201 ")
    assert "DDPOBS_SERVER_MAX_UNDER_WAY_MB" in assert_problem(busy, 503)["detail"]
    assert busy.headers["retry-after"] == "1"
    assert under_way(unhurried.url) == 0
    assert put(unhurried.url, other).status_code == 201


def test_a_client_that_goes_in_the_middle_leaves_nothing_behind(unhurried: Collector) -> None:
    with upload(unhurried.url, 1000) as client:
        client.sendall(b"{" * 900)
        until(lambda: under_way(unhurried.url) >= 900)
    until(lambda: under_way(unhurried.url) == 0)


def under_way(url: str) -> float:
    seen = httpx.get(f"{url}/metrics", params={"only": "collector"}).text
    found = re.search(r"^ddpobs_server_under_way_bytes (.+)$", seen, re.MULTILINE)
    assert found is not None
    return float(found[1])


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


FAR: dict[str, dict[str, Any]] = {
    "anchor.wall_ns": {"anchor": wire.Anchor(wall_ns=-1, monotonic_ns=0)},
    "steps.start_ns": {"steps": steps(0, 2, start_ns=np.array([0, 1]) - MONTHS, end_ns=np.array([100, 101]) - MONTHS)},
    "steps.data_ns": {"steps": steps(0, 1, end_ns=np.array([MONTHS]), data_ns=np.array([MONTHS]))},
    "spans.ready_ns": {"spans": spans(0, 1, ready_ns=np.array([0, -MONTHS]))},
    "spans.started_ns": {"spans": spans(0, 1, started_ns=np.array([-1, -MONTHS]))},
    "spans.done_ns": {"spans": spans(0, 1, done_ns=np.array([MONTHS, MONTHS]))},
    "steps.samples": {"steps": steps(0, 1, samples=np.array([2**62]))},
    "steps.own_data_ns": {"steps": steps(0, 1, own_data_ns=np.array([-(2**62)]))},
    "spans.bucket": {"spans": spans(0, 1, bucket=np.array([0, 2**31]))},
}


@pytest.mark.parametrize("field", FAR)
def test_times_and_counts_that_no_training_has_are_refused(small: Collector, run: str, field: str) -> None:
    assert assert_problem(put(small.url, batch(run, **FAR[field]), "unpacked"), 422)["field"] == field


def test_a_wall_clock_that_is_ahead_is_marked(small: Collector, run: str) -> None:
    now = time.time_ns()
    put(small.url, batch(run, anchor=wire.Anchor(wall_ns=now, monotonic_ns=0), steps=steps(0, 1)))
    hour = wire.Anchor(wall_ns=now + 3600 * 10**9, monotonic_ns=0)
    put(small.url, batch(run, rank=1, anchor=hour, steps=steps(0, 1)))
    well, ahead = get(small.url, f"/runs/{run}/ranks")["ranks"]
    assert well["clock_ahead_ns"] < 60 * 10**9 < ahead["clock_ahead_ns"] <= 3600 * 10**9
    (finding,) = [f for f in get(small.url, f"/runs/{run}/diagnostics")["findings"] if f["code"] == "clock-skew"]
    assert finding["ranks"] == [1]


def test_every_limit_is_documented_with_its_default() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    documented = dict(re.findall(r"^\| `([A-Z_]+)` \| ([\d,]+)", text, re.MULTILINE))
    known = {name: Settings.model_fields[name].default for name in (*LIMITS, "max_runs", "queue_batches")}
    found = {name.lower(): float(value.replace(",", "")) for name, value in documented.items()}
    assert {name: found.get(name) for name in known} == known


def test_headers_without_end_are_ended(small: Collector) -> None:
    address = urlsplit(small.url)
    with socket.create_connection((address.hostname, address.port), 60) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\nX-Long: ")
        with pytest.raises(OSError, match=r"reset|pipe"):
            send_on(client, b"x" * 10_000, 5)


def test_a_request_with_all_headers_that_are_allowed_is_answered(small: Collector, run: str) -> None:
    answer = put(small.url, batch(run, steps=steps(0, 40)), **{"X-Long": "x" * 50_000})
    assert answer.status_code == 201
    assert_problem(httpx.get(small.url, headers={"X-Long": "x" * 400_000}), 431)


def empty() -> FastAPI:
    app = FastAPI(openapi_url=None)
    app.state.registry = CollectorRegistry()
    problems.install(app)
    return app


@contextmanager
def served(app: FastAPI | None = None) -> Iterator[tuple[str, int]]:
    """The address of a server; of its own it answers every request 404 before its body has come."""
    app = app or empty()
    listening = socket.create_server(("127.0.0.1", 0))
    # What the system holds is no harm, nor bounded here.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server = uvicorn.Server(uvicorn.Config(app, http=heads.BoundedHead, ws="none", log_config=None))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield listening.getsockname()
    finally:
        server.should_exit = True
        thread.join(60)


def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "MOST_S", 0.2)
    with served() as address, socket.create_connection(address, 60) as client:
        client.sendall(b"GET / HTTP/1.1\r\n")
        assert answered(client).startswith("HTTP/1.1 408 ")


@pytest.mark.parametrize("request_line", ["GET / HTTP/1.1", f"PUT {path(batch('trailing'))} HTTP/1.1"])
@pytest.mark.parametrize("trailers", [b"a: b\r\n" * 1000, b"x" * 6000], ids=["many", "long"])
def test_trailers_without_end_are_ended(unhurried: Collector, request_line: str, trailers: bytes) -> None:
    address = urlsplit(unhurried.url)
    head = f"{request_line}\r\nHost: here\r\nContent-Type: {wire.JSON}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    with socket.create_connection((address.hostname, address.port), 60) as client:
        client.sendall(head.encode())
        with pytest.raises(OSError, match=r"reset|pipe"):
            send_on(client, trailers, 30)  # An upload would be ended after 60 s.


def send_on(client: socket.socket, data: bytes, seconds: float) -> None:
    """Send it again and again."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        client.sendall(data)
        time.sleep(0.01)


def test_a_trailer_is_no_header(small: Collector, run: str) -> None:
    sent = batch(run, steps=steps(0, 1))
    body = wire.encode_json(sent)
    head = f"PUT {path(sent)} HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
    address = urlsplit(small.url)
    with socket.create_connection((address.hostname, address.port), 60) as client:
        client.sendall(
            head.encode() + b"%x\r\n%b\r\n0\r\nContent-Type: %b\r\n\r\n" % (len(body), body, wire.JSON.encode())
        )
        assert client.recv(65536).startswith(b"HTTP/1.1 415 ")


def test_a_body_that_goes_on_after_its_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "REST_S", 3.0)
    with served() as address, socket.create_connection(address, 60) as client:
        client.sendall(b"PUT / HTTP/1.1\r\nHost: here\r\nContent-Length: 1000000\r\n\r\n")
        send_on(client, b"x", 0.2)
        assert client.recv(65536).startswith(b"HTTP/1.1 404 ")
        with pytest.raises(OSError, match=r"reset|pipe"):
            send_on(client, b"x", 60)


@pytest.mark.parametrize("body", [b"", b"x"], ids=["answered after it", "answered before its end"])
def test_after_a_request_the_next_is_waited_for_as_the_first(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    monkeypatch.setattr(heads, "MOST_S", 2.0)
    with served() as address, socket.create_connection(address, 60) as client:
        client.sendall(b"PUT / HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n" % len(body))
        first = b""
        while not first.endswith(b"}"):
            first += client.recv(65536)
        assert first.startswith(b"HTTP/1.1 404 ")
        client.sendall(body or b"\r\n")
        assert answered(client)[:12] == ("" if body else "HTTP/1.1 408"), "closed, and told why where one had begun"


NO_REQUESTS = {
    "a method that nobody knows": b"NONE / HTTP/1.1\r\n",
    "two lengths": b"PUT / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n",
    "a length below zero": b"PUT / HTTP/1.1\r\nContent-Length: -1\r\n",
    "a path beyond ASCII": b"GET /\xff HTTP/1.1\r\n",
    "a piece of no length": b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
}


@pytest.mark.parametrize("what", NO_REQUESTS)
def test_what_is_no_request_is_told_so_by_a_problem_and_counted(small: Collector, what: str) -> None:
    before = malformed(small.url)
    address = urlsplit(small.url)
    with socket.create_connection((address.hostname, address.port), 60) as client:
        client.sendall(NO_REQUESTS[what] + b"\r\n")
        head, _, body = answered(client).partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 400 ")
    assert "Content-Type: application/problem+json" in head
    assert msgspec.json.decode(body)["title"] == "Malformed request"
    assert malformed(small.url) == before + 1


def malformed(url: str) -> float:
    seen = httpx.get(f"{url}/metrics", params={"only": "collector"}).text
    found = re.search(r'^ddpobs_server_problems_total{.*"Malformed request",status="400"} (.+)$', seen, re.MULTILINE)
    return float(found[1]) if found else 0.0


SMALL_BYTES, SLOW_BYTES, LARGE_BYTES = 50_000, 2_000_000, 10_000_000


@contextmanager
def zeros_served(folder: Path) -> Iterator[tuple[str, int]]:
    """A collector that answers with as much as it is asked for, and takes turns as for any read."""
    router = APIRouter(route_class=InTurn)

    @router.get("/zeros/{count}")
    def zeros(count: int) -> Response:
        return Response(bytes(count))

    app = create_app(Settings(database_url=databases.sqlite(folder)))
    app.include_router(router)
    with served(app) as address:
        yield address


@contextmanager
def asking(address: tuple[str, int], target: str = f"/zeros/{LARGE_BYTES}") -> Iterator[socket.socket]:
    """Someone who asks, and whose system holds little that was not read."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect(address)
        client.sendall(f"GET {target} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
        yield client


@pytest.mark.parametrize("count", [SMALL_BYTES, LARGE_BYTES])
def test_a_reader_who_does_not_read_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(heads, "MOST_S", 0.3)
    monkeypatch.setattr(heads, "UNREAD_S", 0.3)
    with zeros_served(tmp_path) as address, asking(address, f"/zeros/{count}") as client:
        time.sleep(1.5)
        assert len(answered(client)) < count


def test_a_slow_reader_gets_the_whole_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_PIECE_BYTES", 2**14)
    monkeypatch.setattr(heads, "UNREAD_S", 2.0)
    with zeros_served(tmp_path) as address, asking(address, f"/zeros/{SLOW_BYTES}") as client:
        began, came = time.monotonic(), 0
        while came < SLOW_BYTES:
            chunk = client.recv(2**20)
            assert chunk, "cut off"
            came += len(chunk)
            time.sleep(max(0.0, began + 3 * came / SLOW_BYTES - time.monotonic()))
    assert time.monotonic() - began > 2.5


def test_so_many_answers_are_under_way_and_those_that_nobody_reads_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "_UNSENT", 2)
    monkeypatch.setattr(heads, "UNREAD_S", 6.0)
    with zeros_served(tmp_path) as address, asking(address), asking(address):
        time.sleep(0.5)
        with asking(address, "/api/v1/runs") as third:
            third.settimeout(0.3)
            with pytest.raises(TimeoutError):
                third.recv(1)
            assert httpx.get(f"http://{address[0]}:{address[1]}/healthz").status_code == 200
            third.settimeout(60)
            assert third.recv(65536).startswith(b"HTTP/1.1 200 ")
