"""Limits of headers, trailers, late bodies and unread responses."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
from ddpobs_server.api import concurrency
from ddpobs_server.api.concurrency import ConcurrencyLimitedRoute
from ddpobs_server.app import create_app
from ddpobs_server.settings import Settings
from ddpobs_server.web import bounded_protocol, chunked_responses
from fastapi import APIRouter, Response

from benchmarks.rig import databases
from benchmarks.rig.collector import Collector
from ddpobs import wire
from tests.support.server.batches import assert_problem, batch, path, put, steps
from tests.support.server.serving import read_until_closed, served


def test_a_connection_with_endless_headers_is_closed(on_sqlite: Collector) -> None:
    address = urlsplit(on_sqlite.url)
    with socket.create_connection((address.hostname, address.port), 60) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\nX-Long: ")
        with pytest.raises(OSError, match=r"reset|pipe"):
            send_on(client, b"x" * 10_000, 30)


def test_headers_up_to_the_limit_are_accepted_and_larger_ones_get_431(on_sqlite: Collector, run: str) -> None:
    answer = put(on_sqlite.url, batch(run, steps=steps(0, 40)), **{"X-Long": "x" * 50_000})
    assert answer.status_code == 201
    assert_problem(httpx.get(on_sqlite.url, headers={"X-Long": "x" * 400_000}), 431)


def test_headers_that_do_not_arrive_in_time_get_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_protocol, "HEAD_S", 0.2)
    with served() as address, socket.create_connection(address, 60) as client:
        client.sendall(b"GET / HTTP/1.1\r\n")
        assert read_until_closed(client).startswith("HTTP/1.1 408 ")


@pytest.mark.parametrize("request_line", ["GET / HTTP/1.1", f"PUT {path(batch('trailing'))} HTTP/1.1"])
@pytest.mark.parametrize("trailers", [b"a: b\r\n" * 1000, b"x" * 6000], ids=["many", "long"])
def test_a_connection_with_endless_trailers_is_closed(on_sqlite: Collector, request_line: str, trailers: bytes) -> None:
    address = urlsplit(on_sqlite.url)
    head = f"{request_line}\r\nHost: here\r\nContent-Type: {wire.JSON}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    with socket.create_connection((address.hostname, address.port), 60) as client:
        client.sendall(head.encode())
        with pytest.raises(OSError, match=r"reset|pipe"):
            send_on(client, trailers, 30)  # The time limit of an upload is 60 s.


def send_on(client: socket.socket, data: bytes, seconds: float) -> None:
    """Send the data repeatedly for some seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        client.sendall(data)
        time.sleep(0.01)


def test_a_trailer_is_not_taken_as_a_header(on_sqlite: Collector, run: str) -> None:
    payload = batch(run, steps=steps(0, 1))
    body = wire.encode_json(payload)
    head = f"PUT {path(payload)} HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
    address = urlsplit(on_sqlite.url)
    with socket.create_connection((address.hostname, address.port), 60) as client:
        client.sendall(
            head.encode() + b"%x\r\n%b\r\n0\r\nContent-Type: %b\r\n\r\n" % (len(body), body, wire.JSON.encode())
        )
        assert client.recv(65536).startswith(b"HTTP/1.1 415 ")


def test_a_body_that_continues_after_its_response_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_protocol, "REST_S", 3.0)
    with served() as address, socket.create_connection(address, 60) as client:
        client.sendall(b"PUT / HTTP/1.1\r\nHost: here\r\nContent-Length: 1000000\r\n\r\n")
        send_on(client, b"x", 0.2)
        assert client.recv(65536).startswith(b"HTTP/1.1 404 ")
        with pytest.raises(OSError, match=r"reset|pipe"):
            send_on(client, b"x", 60)


@pytest.mark.parametrize("body", [b"", b"x"], ids=["response after the body", "response before the end of the body"])
def test_the_next_request_has_the_same_time_limit_as_the_first(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    monkeypatch.setattr(bounded_protocol, "HEAD_S", 2.0)
    with served() as address, socket.create_connection(address, 60) as client:
        client.sendall(b"PUT / HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n" % len(body))
        first = b""
        while not first.endswith(b"}"):
            first += client.recv(65536)
        assert first.startswith(b"HTTP/1.1 404 ")
        client.sendall(body or b"\r\n")
        assert read_until_closed(client)[:12] == ("" if body else "HTTP/1.1 408"), (
            "closed, with a problem if a request had begun"
        )


MALFORMED_REQUESTS = {
    "an unknown method": b"NONE / HTTP/1.1\r\n",
    "two lengths": b"PUT / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n",
    "a length below zero": b"PUT / HTTP/1.1\r\nContent-Length: -1\r\n",
    "a path beyond ASCII": b"GET /\xff HTTP/1.1\r\n",
    "a chunk without a length": b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
}


@pytest.mark.parametrize("case", MALFORMED_REQUESTS)
def test_a_malformed_request_gets_a_problem_and_is_counted(on_sqlite: Collector, case: str) -> None:
    count = problem_count(on_sqlite.url, 400, "Malformed request")
    address = urlsplit(on_sqlite.url)
    with socket.create_connection((address.hostname, address.port), 60) as client:
        client.sendall(MALFORMED_REQUESTS[case] + b"\r\n")
        head, _, body = read_until_closed(client).partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 400 ")
    assert "Content-Type: application/problem+json" in head
    assert msgspec.json.decode(body)["title"] == "Malformed request"
    assert problem_count(on_sqlite.url, 400, "Malformed request") == count + 1


def problem_count(url: str, status: int, title: str) -> float:
    metrics = httpx.get(f"{url}/metrics", params={"only": "collector"}).text
    match = re.search(rf'^ddpobs_server_problems_total{{.*"{title}",status="{status}"}} (.+)$', metrics, re.MULTILINE)
    return float(match[1]) if match else 0.0


SMALL_BYTES, SLOW_BYTES, LARGE_BYTES = 50_000, 2_000_000, 10_000_000


@contextmanager
def zeros_collector(folder: Path) -> Iterator[tuple[str, int]]:
    """A collector with a route that returns the requested number of zeros, limited like any read."""
    router = APIRouter(route_class=ConcurrencyLimitedRoute)

    @router.get("/zeros/{count}")
    def zeros(count: int) -> Response:
        return Response(bytes(count))

    app = create_app(Settings(database_url=databases.migrated_sqlite(folder)))
    app.include_router(router)
    with served(app) as address:
        yield address


@contextmanager
def unread_response(address: tuple[str, int], target: str = f"/zeros/{LARGE_BYTES}") -> Iterator[socket.socket]:
    """A client that sends a request and has a small receive buffer."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect(address)
        client.sendall(f"GET {target} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
        yield client


@pytest.mark.parametrize("count", [SMALL_BYTES, LARGE_BYTES])
def test_a_client_that_does_not_read_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(bounded_protocol, "HEAD_S", 0.3)
    monkeypatch.setattr(bounded_protocol, "UNREAD_S", 0.3)
    with zeros_collector(tmp_path) as address, unread_response(address, f"/zeros/{count}") as client:
        deadline = time.monotonic() + 60
        while not problem_count(f"http://{address[0]}:{address[1]}", 408, "Response not read"):
            assert time.monotonic() < deadline, "the unread response was not aborted"
            time.sleep(0.1)
        assert len(read_until_closed(client)) < count


def test_a_slow_client_gets_the_whole_response(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_responses, "CHUNK_BYTES", 2**14)
    monkeypatch.setattr(bounded_protocol, "UNREAD_S", 2.0)
    with zeros_collector(tmp_path) as address, unread_response(address, f"/zeros/{SLOW_BYTES}") as client:
        began, received = time.monotonic(), 0
        while received < SLOW_BYTES:
            chunk = client.recv(2**20)
            assert chunk, "cut off"
            received += len(chunk)
            time.sleep(max(0.0, began + 3 * received / SLOW_BYTES - time.monotonic()))
    assert time.monotonic() - began > 2.5


def test_large_responses_are_limited_and_unread_ones_are_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrency, "_UNSENT_RESPONSES", 2)
    monkeypatch.setattr(bounded_protocol, "UNREAD_S", 6.0)
    with zeros_collector(tmp_path) as address, unread_response(address) as first, unread_response(address) as second:
        for client in (first, second):
            assert client.recv(1, socket.MSG_PEEK), "the response has not begun"
        assert httpx.get(f"http://{address[0]}:{address[1]}/api/v1/runs").status_code == 200  # It needs no place.
        with unread_response(address) as third:
            third.settimeout(0.3)
            with pytest.raises(TimeoutError):
                third.recv(1)
            assert httpx.get(f"http://{address[0]}:{address[1]}/healthz").status_code == 200
            third.settimeout(60)
            assert third.recv(65536).startswith(b"HTTP/1.1 200 ")
