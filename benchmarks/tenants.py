"""A collector with tokens of two workspaces, and the loads that a workspace may put on it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import numpy as np
from ddpobs_server.store import Store, Token
from ddpobs_server.web.authenticator import new_token

from benchmarks import loads
from ddpobs import wire

_START_S = 300.0
LOAD = loads.Load(ranks=2, batches=1, steps=20, buckets=20, every_s=0.0, clients=1)
"""Batches of 400 spans."""


@dataclass
class Collector:
    """A collector process, which a fault may end and start again on the same port.

    Attributes:
        reader: Another collector on the same database, which starts and ends with this one; then this one only takes
            batches.
    """

    folder: Path
    database_url: str
    settings: dict[str, object] = field(default_factory=dict)
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    command: tuple[str, ...] = (sys.executable, "-m", "ddpobs_server.app")
    reader: Collector | None = None

    def start(self, **settings: object) -> None:
        """Start the process and wait until it is ready, then the reader."""
        log = self.launch(**settings)
        deadline = time.monotonic() + _START_S
        while not (match := re.search(r"https?://[^:]+:(\d+)", log.read_text())):
            if time.monotonic() > deadline or self.process is None or self.process.poll() is not None:
                raise RuntimeError(f"no collector: {log.read_text()}")
            time.sleep(0.05)
        self.port = int(match[1])
        if self.reader is not None:
            self.reader.start(**settings)

    def launch(self, **settings: object) -> Path:
        """Start the process without waiting for it; return its log."""
        own = {"port": self.port, "database_url": self.database_url, "ingest_only": self.reader is not None}
        values = own | self.settings | settings
        environ = {name: value for name, value in os.environ.items() if not name.startswith("DDPOBS_")}
        environ |= {f"DDPOBS_SERVER_{name.upper()}": str(value) for name, value in values.items()}
        log = self.folder / "collector.log"
        with log.open("wb") as output:
            self.process = subprocess.Popen(self.command, stdout=output, stderr=output, env=environ, cwd=self.folder)
        return log

    @property
    def url(self) -> str:
        """Address of the collector."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def reading(self) -> Collector:
        """The collector that serves reads."""
        return self.reader or self

    def end(self, *, kill: bool = False) -> None:
        """End the process, in order or at once, and the reader's."""
        if self.reader is not None:
            self.reader.end(kill=kill)
        if self.process is not None:
            self.process.kill() if kill else self.process.terminate()
            self.process.wait(60)

    def memory_bytes(self, name: str = "VmRSS") -> int:
        """Resident memory of the process and of the reader's; `VmHWM` is its peak. Zero of one that has ended."""
        size_bytes = 0 if self.reader is None else self.reader.memory_bytes(name)
        with suppress(OSError, AttributeError):
            status = Path(f"/proc/{self.process.pid}/status").read_text()  # type: ignore[union-attr]
            if match := re.search(rf"{name}:\s+(\d+)", status):
                return size_bytes + int(match[1]) * 1024
        return size_bytes


def new_tokens(*workspaces: str) -> tuple[list[str], list[Token]]:
    """Secrets with the scopes ingest and read for each workspace, and the records to store."""
    created = [new_token(workspace, workspace, ["ingest", "read"]) for workspace in workspaces]
    return [secret for secret, _ in created], [record for _, record in created]


def tokens(database_url: str, *workspaces: str) -> list[str]:
    """Create a token with the scopes ingest and read for each workspace."""
    secrets, records = new_tokens(*workspaces)
    store = Store(database_url)
    store.migrate()
    for record in records:
        store.add_token(record)
    store.close()
    return secrets


@dataclass
class Tenant:
    """A workspace's clients."""

    collector: Collector
    token: str
    run: str

    @property
    def headers(self) -> dict[str, str]:
        """Headers of each request."""
        return {"Authorization": f"Bearer {self.token}"}

    def batch(self, rank: int, seq: int, run: str = "", **fields: object) -> wire.Batch:
        """A batch of 400 spans; the first names the buckets."""
        plain = loads.batch(LOAD, rank, seq)
        if seq == 0 and not fields:
            names = [wire.Parameter(name="weight", size=250_000)]
            buckets = [wire.Bucket(size_bytes=1_000_000, dtype="float32", parameters=names)] * LOAD.buckets
            fields = {"layouts": [wire.Layout(module=0, name="m", revision=0, comm="allreduce", buckets=buckets)]}
        return msgspec.structs.replace(plain, run=run or self.run, **fields)

    def put(self, client: httpx.Client, payload: wire.Batch) -> httpx.Response:
        """Send a batch once."""
        path = f"/api/v1/runs/{payload.run}/sources/{payload.source}/batches/{payload.seq}"
        headers = {**self.headers, "Content-Type": wire.MSGPACK}
        return client.put(self.collector.url + path, content=wire.encode(payload), headers=headers)

    def get(self, client: httpx.Client, path: str) -> httpx.Response:
        """Read a route of the run."""
        return client.get(f"{self.collector.reading.url}/api/v1/runs/{self.run}{path}", headers=self.headers)

    @contextmanager
    def unfinished_bodies(self, count: int) -> Iterator[None]:
        """Hold connections that each announce 10 MB and send half a megabyte."""
        head = (
            f"PUT /api/v1/runs/{self.run}/sources/{'f' * 16}/batches/0 HTTP/1.1\r\nHost: here\r\n"
            f"Authorization: Bearer {self.token}\r\nContent-Type: {wire.MSGPACK}\r\nContent-Length: 10000000\r\n\r\n"
        )
        with _connections(self.collector.url, count, head.encode() + bytes(500_000)):
            yield

    @contextmanager
    def slow_readers(self, count: int, path: str = "/spans") -> Iterator[None]:
        """Hold connections that request a large answer and do not read it."""
        head = f"GET /api/v1/runs/{self.run}{path} HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {self.token}\r\n\r\n"
        with _connections(self.collector.reading.url, count, head.encode()):
            yield


@contextmanager
def _connections(url: str, count: int, data: bytes) -> Iterator[None]:
    address = urlsplit(url)
    clients = []
    try:
        for _ in range(count):
            with suppress(OSError):
                client = socket.socket()
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.settimeout(2)
                client.connect((address.hostname, address.port))
                clients.append(client)
                client.sendall(data)
        yield
    finally:
        for client in clients:
            client.close()


def hostile_batches(tenant: Tenant, seq: int) -> list[wire.Batch]:
    """Batches of a few hundred bytes to some MB that are costly to keep or to read.

    Buckets that no layout names, layouts of many buckets, long unused sets, straggler statistics of every rank.
    """
    number = np.arange(50_000)
    unnamed = wire.Spans(
        step=np.full(len(number), seq),
        module=number // 1000,
        revision=np.zeros(len(number), np.int64),
        bucket=number % 1000,
        **{name: np.zeros(len(number), np.int64) for name in ("ready_ns", "launched_ns", "done_ns")},
        **{name: np.full(len(number), wire.UNKNOWN) for name in ("started_ns", "waited_ns")},
    )
    names = [f"layer.{seq}.{index}" for index in range(50_000)]
    buckets = [wire.Bucket(size_bytes=1, dtype="f", parameters=[])] * 9_999
    layouts = [wire.Layout(module=seq % 900, name="m", revision=0, comm="c", buckets=buckets)]
    plain = {"steps": None, "spans": None, "packed_spans": None}
    return [
        tenant.batch(0, 3 * seq + 1, "hostile", **plain | {"spans": unnamed}),
        tenant.batch(0, 3 * seq + 2, "hostile", **plain, layouts=layouts),
        tenant.batch(
            0, 3 * seq + 3, "hostile", **plain, unused=[wire.Unused(step=0, module=0, locally=names, globally=[])]
        ),
    ]


class Background:
    """A loop on a thread, until the end of the block.

    Args:
        work: Called again and again; it gets the number of the call. Its connection errors are ignored.
    """

    def __init__(self, work: Callable[[int], None]) -> None:
        self._work, self._ended = work, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(60)

    def _run(self) -> None:
        number = 0
        while not self._ended.is_set():
            with suppress(httpx.HTTPError, OSError):
                self._work(number)
            number += 1
