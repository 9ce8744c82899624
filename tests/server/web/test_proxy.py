"""Two collectors on one PostgreSQL behind a real nginx, as configured in `deploy/`."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard

from benchmarks.rig import databases
from benchmarks.rig.collector import Collector, collector
from ddpobs import TelemetryConfig, wire
from ddpobs.export.http_sender import Outcome, Sender
from tests.support.server.batches import assert_problem, batch, spans, steps
from tests.support.server.nginx import proxy

CONFIG = Path(__file__).resolve().parents[3] / "deploy" / "nginx.conf"
TOKEN = "s3cret"
RANKS, BATCHES = 4, 40


@pytest.fixture
def behind(postgresql: databases.Fresh, tmp_path: Path) -> Iterator[tuple[str, list[Collector]]]:
    """The proxy's address, and the collectors."""
    database = postgresql(tmp_path)
    with ExitStack() as stack:
        running = []
        for name in "ab":
            (tmp_path / name).mkdir()
            settings: dict[str, Any] = {"database_url": database, "token": TOKEN, "trusted_proxies": "127.0.0.1"}
            running.append(stack.enter_context(collector(tmp_path / name, **settings)))
        yield stack.enter_context(proxy(tmp_path, [backend.url for backend in running])), running


def test_every_batch_is_stored_once_when_one_of_two_collectors_is_killed(behind: tuple[str, list[Collector]]) -> None:
    url, (first, second) = behind
    acknowledged, killed = [0] * RANKS, threading.Event()

    def send(rank: int) -> None:
        sender = Sender(TelemetryConfig(collector=url, token=TOKEN))
        for seq in range(BATCHES):
            if seq == BATCHES // 2:
                assert killed.wait(60)
            payload = batch("both", seq=seq, rank=rank, world_size=RANKS, steps=steps(seq, 1), spans=spans(seq, 1))
            body = zstandard.compress(wire.encode(payload))
            while sender.send(payload.run, payload.source, seq, body).outcome not in (Outcome.STORED, Outcome.REPEATED):
                time.sleep(0.05)
            acknowledged[rank] += 1
        sender.close()

    threads = [threading.Thread(target=send, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    while sum(acknowledged) < RANKS * BATCHES // 4:
        time.sleep(0.01)
    first.end(signal.SIGKILL)
    killed.set()
    for thread in threads:
        thread.join()
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    for address in (url, second.url):
        ranks = httpx.get(f"{address}/api/v1/runs/both/ranks", headers=bearer).json()["ranks"]
        assert [rank["steps"] for rank in ranks] == [BATCHES] * RANKS
        stored = httpx.get(f"{address}/api/v1/runs/both/spans", headers=bearer).json()["columns"]["step"]
        assert len(stored) == RANKS * BATCHES * 2

    with client_at("127.0.0.2", url) as guessing, client_at("127.0.0.3", url) as other:
        for number in range(20):
            forged = {"Authorization": f"Bearer guess-{number}", "X-Forwarded-For": f"10.0.0.{number}"}
            assert_problem(guessing.get("/api/v1/runs", headers=forged), 401)
        refused = assert_problem(guessing.get("/api/v1/runs", headers=bearer), 429)
        assert "127.0.0.2" in refused["detail"]
        assert other.get("/api/v1/runs", headers=bearer).status_code == 200


class Busy(BaseHTTPRequestHandler):
    """A collector that refuses every batch with 503."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(503)
        self.send_header("Retry-After", "7")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Write no log."""


def test_the_503_of_two_busy_collectors_reaches_the_client(tmp_path: Path) -> None:
    with ExitStack() as stack:
        addresses = []
        for _ in range(2):
            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Busy))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            addresses.append(f"http://127.0.0.1:{server.server_port}")
        url = stack.enter_context(proxy(tmp_path, addresses))
        for _ in range(12):
            answer = httpx.put(f"{url}/api/v1/runs/a/sources/{0:016x}/batches/0", content=b"x")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
        assert httpx.get(f"{url}/healthz").status_code == 200


def client_at(address: str, url: str) -> httpx.Client:
    """A client with another local address."""
    return httpx.Client(base_url=url, transport=httpx.HTTPTransport(local_address=address))
