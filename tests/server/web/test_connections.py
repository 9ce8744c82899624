"""What comes beside a body, or goes on after it, is bounded; and so is an answer that nobody reads."""

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

from ddpobs import wire
from tests import databases
from tests.collector import Collector
from tests.server.batches import assert_problem, batch, path, put, steps
from tests.server.serving import answered, served


def test_headers_without_end_are_ended(on_sqlite: Collector) -> None:
    address = urlsplit(on_sqlite.url)
    with socket.create_connection((address.hostname, address.port), 60) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\nX-Long: ")
        with pytest.raises(OSError, match=r"reset|pipe"):
            send_on(client, b"x" * 10_000, 30)


def test_a_request_with_all_headers_that_are_allowed_is_answered(on_sqlite: Collector, run: str) -> None:
    answer = put(on_sqlite.url, batch(run, steps=steps(0, 40)), **{"X-Long": "x" * 50_000})
    assert answer.status_code == 201
    assert_problem(httpx.get(on_sqlite.url, headers={"X-Long": "x" * 400_000}), 431)


def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_protocol, "MOST_S", 0.2)
    with served() as address, socket.create_connection(address, 60) as client:
        client.sendall(b"GET / HTTP/1.1\r\n")
        assert answered(client).startswith("HTTP/1.1 408 ")


@pytest.mark.parametrize("request_line", ["GET / HTTP/1.1", f"PUT {path(batch('trailing'))} HTTP/1.1"])
@pytest.mark.parametrize("trailers", [b"a: b\r\n" * 1000, b"x" * 6000], ids=["many", "long"])
def test_trailers_without_end_are_ended(on_sqlite: Collector, request_line: str, trailers: bytes) -> None:
    address = urlsplit(on_sqlite.url)
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


def test_a_trailer_is_no_header(on_sqlite: Collector, run: str) -> None:
    sent = batch(run, steps=steps(0, 1))
    body = wire.encode_json(sent)
    head = f"PUT {path(sent)} HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
    address = urlsplit(on_sqlite.url)
    with socket.create_connection((address.hostname, address.port), 60) as client:
        client.sendall(
            head.encode() + b"%x\r\n%b\r\n0\r\nContent-Type: %b\r\n\r\n" % (len(body), body, wire.JSON.encode())
        )
        assert client.recv(65536).startswith(b"HTTP/1.1 415 ")


def test_a_body_that_goes_on_after_its_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_protocol, "REST_S", 3.0)
    with served() as address, socket.create_connection(address, 60) as client:
        client.sendall(b"PUT / HTTP/1.1\r\nHost: here\r\nContent-Length: 1000000\r\n\r\n")
        send_on(client, b"x", 0.2)
        assert client.recv(65536).startswith(b"HTTP/1.1 404 ")
        with pytest.raises(OSError, match=r"reset|pipe"):
            send_on(client, b"x", 60)


@pytest.mark.parametrize("body", [b"", b"x"], ids=["answered after it", "answered before its end"])
def test_after_a_request_the_next_is_waited_for_as_the_first(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    monkeypatch.setattr(bounded_protocol, "MOST_S", 2.0)
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
def test_what_is_no_request_is_told_so_by_a_problem_and_counted(on_sqlite: Collector, what: str) -> None:
    before = problems_told(on_sqlite.url, 400, "Malformed request")
    address = urlsplit(on_sqlite.url)
    with socket.create_connection((address.hostname, address.port), 60) as client:
        client.sendall(NO_REQUESTS[what] + b"\r\n")
        head, _, body = answered(client).partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 400 ")
    assert "Content-Type: application/problem+json" in head
    assert msgspec.json.decode(body)["title"] == "Malformed request"
    assert problems_told(on_sqlite.url, 400, "Malformed request") == before + 1


def problems_told(url: str, status: int, title: str) -> float:
    seen = httpx.get(f"{url}/metrics", params={"only": "collector"}).text
    found = re.search(rf'^ddpobs_server_problems_total{{.*"{title}",status="{status}"}} (.+)$', seen, re.MULTILINE)
    return float(found[1]) if found else 0.0


SMALL_BYTES, SLOW_BYTES, LARGE_BYTES = 50_000, 2_000_000, 10_000_000


@contextmanager
def zeros_served(folder: Path) -> Iterator[tuple[str, int]]:
    """A collector that answers with as much as it is asked for, and takes turns as for any read."""
    router = APIRouter(route_class=ConcurrencyLimitedRoute)

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
    monkeypatch.setattr(bounded_protocol, "MOST_S", 0.3)
    monkeypatch.setattr(bounded_protocol, "UNREAD_S", 0.3)
    with zeros_served(tmp_path) as address, asking(address, f"/zeros/{count}") as client:
        deadline = time.monotonic() + 60
        while not problems_told(f"http://{address[0]}:{address[1]}", 408, "Answer not read"):
            assert time.monotonic() < deadline, "whoever reads nothing is waited for"
            time.sleep(0.1)
        assert len(answered(client)) < count


def test_a_slow_reader_gets_the_whole_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_responses, "_PIECE_BYTES", 2**14)
    monkeypatch.setattr(bounded_protocol, "UNREAD_S", 2.0)
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
    monkeypatch.setattr(concurrency, "_UNSENT", 2)
    monkeypatch.setattr(bounded_protocol, "UNREAD_S", 6.0)
    with zeros_served(tmp_path) as address, asking(address) as first, asking(address) as second:
        for reader in (first, second):
            assert reader.recv(1, socket.MSG_PEEK), "its answer is under way"
        with asking(address, "/api/v1/runs") as third:
            third.settimeout(0.3)
            with pytest.raises(TimeoutError):
                third.recv(1)
            assert httpx.get(f"http://{address[0]}:{address[1]}/healthz").status_code == 200
            third.settimeout(60)
            assert third.recv(65536).startswith(b"HTTP/1.1 200 ")
