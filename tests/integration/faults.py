"""What tests of faults are made of: ranks that keep sending, a collector that can be killed, a proxy that misbehaves.

The ranks send through the real exporter, the collector is the real command, and what arrived is counted span by span.
"""

from __future__ import annotations

import http.client
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from ddpobs import wire
from ddpobs.config import TelemetryConfig
from ddpobs.export.exporter import Exporter
from ddpobs.export.identity import Envelope, Identity
from ddpobs.export.spool import Spool
from tests import collector as collectors
from tests.ports import free_port
from tests.server.batches import ATTEMPT, get, source_of, spans, steps

BUCKETS = 2
WEIGHT = 1 + BUCKETS
"""Records of a step: itself and its bucket spans."""
_STEP_S = 0.02
_MOST_SPOOLED = 200
"""Batches, five seconds of four ranks: by what a slow machine falls behind, the ranks wait for it."""


def until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"it did not come true within {seconds} s"
        time.sleep(0.1)


class Ranks:
    """Ranks that finish a step every few milliseconds, and tell of it through the real exporter.

    Attributes:
        steps: How many steps each rank has offered; their numbers count from 0.
        exporters: One a rank.
    """

    def __init__(self, url: str, run: str, spool: Path, count: int = 4, **settings: Any) -> None:
        spool.mkdir(exist_ok=True)
        config = TelemetryConfig(collector=url, spool=spool, **{"batch_spans": 15, "flush_s": 0.1, **settings})
        self.run, self.spool = run, spool
        self.steps = [0] * count
        self.exporters = [Exporter(config, _encode) for _ in range(count)]
        for rank, exporter in enumerate(self.exporters):
            exporter.identify(Identity(run, ATTEMPT, source_of(rank), rank, count))
            exporter.start()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._train, daemon=True)

    def __enter__(self) -> Ranks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Train no more, and flush; what the collector does not take is in the spool then."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        with ThreadPoolExecutor(len(self.exporters)) as pool:
            list(pool.map(Exporter.close, self.exporters))

    def step(self, count: int = 1) -> None:
        """Have every rank finish so many steps."""
        for _ in range(count):
            for rank, exporter in enumerate(self.exporters):
                exporter.offer(self.steps[rank], WEIGHT)
                self.steps[rank] += 1

    def _train(self) -> None:
        while not self._ended.wait(_STEP_S):
            if spooled(self) < _MOST_SPOOLED:
                self.step()


def _encode(records: Sequence[object], envelope: Envelope) -> wire.Batch:
    number = np.array(records, np.int64)
    return wire.Batch(
        version=wire.VERSION,
        **vars(envelope),
        steps=steps(0, len(number), step=number, collective=number),
        spans=spans(0, len(number), step=np.repeat(number, BUCKETS)),
    )


class Mortal:
    """A collector that may be killed and started again: the same port, the same database.

    Args:
        folder: For its log, and its database unless the settings name one.
        away: It is not started yet.
        settings: The collector's.
    """

    def __init__(self, folder: Path, *, away: bool = False, **settings: object) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._settings = folder, settings
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._stack = ExitStack()
        if not away:
            self.start()

    def __enter__(self) -> Mortal:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self) -> None:
        """Start it; back once it is ready."""
        running = collectors.collector(self._folder, port=self.port, **self._settings)
        self.running = self._stack.enter_context(running)

    def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        """By SIGKILL nothing is flushed and nobody is told; by SIGTERM it ends well, with 0."""
        assert self.running.end(how) == (0 if how is signal.SIGTERM else -how)

    def batches(self, outcome: str = "stored") -> float:
        """Batches with this outcome since its start, by its own metrics."""
        told = httpx.get(f"{self.url}/metrics", timeout=30).text
        found = re.search(rf'^ddpobs_server_batches_total{{outcome="{outcome}"}} (\S+)$', told, re.MULTILINE)
        assert found, told
        return float(found[1])

    def until_batches(self, more: int, outcome: str = "stored") -> None:
        """Wait until so many batches more had this outcome."""
        wanted = self.batches(outcome) + more
        until(lambda: self.batches(outcome) >= wanted)


def push(spool: Path, url: str) -> str:
    """`ddpobs push`, which must send all of the spool; what it said."""
    command = [str(Path(sys.executable).with_name("ddpobs")), "push", str(spool), "--collector", url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def stored(url: str, run: str) -> Counter[tuple[int, int, int]]:
    """(rank, step, bucket) of every span that the collector gives back."""
    columns = get(url, f"/runs/{run}/spans")["columns"]
    return Counter(zip(columns["rank"], columns["step"], columns["bucket"], strict=True))


def assert_once(url: str, run: str, expected: Sequence[int]) -> None:
    """Every span and step is there once, and the sums hold each once.

    Args:
        url: The collector's address.
        run: The run.
        expected: How many steps each rank finished.
    """
    wanted = Counter((r, step, b) for r, count in enumerate(expected) for step in range(count) for b in range(BUCKETS))
    found = stored(url, run)
    assert found == wanted, f"lost {list(wanted - found)[:5]}, too many {list(found - wanted)[:5]}"
    columns = get(url, f"/runs/{run}/steps")["columns"]
    assert Counter(columns["rank"]) == Counter(dict(enumerate(expected)))
    assert len(set(zip(columns["rank"], columns["step"], strict=True))) == sum(expected)
    assert_sums(url, run, wanted)


def whole(url: str, run: str) -> bool:
    """Whether spans, steps and sums tell of the same steps, each once; false also where a batch came in between."""
    found = stored(url, run)
    assert set(found.values()) == {1}
    with suppress(AssertionError):
        assert_sums(url, run, found)
        return True
    return False


def assert_sums(url: str, run: str, spans_stored: Counter[tuple[int, int, int]]) -> None:
    """The sums by bucket and by rank are those of the spans that are there."""
    buckets = {bucket["bucket"]: bucket["steps"] for bucket in get(url, f"/runs/{run}/buckets")["buckets"]}
    assert buckets == Counter(bucket for _, _, bucket in spans_stored)
    ranks = {rank["rank"]: BUCKETS * rank["steps"] for rank in get(url, f"/runs/{run}/ranks")["ranks"]}
    assert ranks == Counter(rank for rank, _, _ in spans_stored)


def spooled(ranks: Ranks) -> int:
    """Batches in the ranks' spool."""
    return sum(1 for _ in Spool(ranks.spool, 1).batches())


class Proxy:
    """A proxy before some collectors. It goes to the next where one does not answer, and misbehaves as asked.

    Attributes:
        faults: What may become of a `PUT`; one is drawn for each. Nothing but passing it on where it is empty.
        seen: How often each happened.
    """

    def __init__(self, *upstreams: str, faults: Sequence[str] = (), seed: int = 0) -> None:
        self.upstreams = [(split.hostname or "", split.port) for split in map(urlsplit, upstreams)]
        self.faults, self.seen = faults, Counter[str]()
        self._random = random.Random(seed)
        self._late: list[threading.Thread] = []

    def settle(self) -> None:
        """Wait for what was held back."""
        while self._late:
            self._late.pop().join()

    def draw(self) -> str:
        """What becomes of this request."""
        fault = self._random.choice(self.faults) if self.faults else "pass"
        self.seen[fault] += 1
        return fault

    def forward(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        """The answer of the first collector that gives one."""
        for host, port in self.upstreams:
            connection = http.client.HTTPConnection(host, port, timeout=30)
            try:
                connection.request("PUT", path, body, headers)
                answer = connection.getresponse()
                return answer.status, answer.read()
            except (OSError, http.client.HTTPException):
                continue
            finally:
                connection.close()
        return 502, b"<html>nobody is there</html>"

    def forward_half(self, path: str, headers: dict[str, str], body: bytes) -> None:
        """Begin to pass a request on, and hang up."""
        with suppress(OSError), socket.create_connection(self.upstreams[0], 30) as connection:
            head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            text = f"PUT {path} HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode()
            connection.sendall(text + body[: len(body) // 2])

    def later(self, *request: Any) -> None:
        """Pass a request on when others have overtaken it."""
        delay_s = self._random.uniform(0.1, 0.6)
        thread = threading.Thread(target=lambda: (time.sleep(delay_s), self.forward(*request)), daemon=True)
        thread.start()
        self._late.append(thread)


FAULTS = ("pass", "cut", "cut_half", "cut_answer", "delay", "twice", "late", "late_and_answered_502", "rubbish")
_HOP = ("connection", "content-length", "accept-encoding")


@contextmanager
def proxy(made: Proxy) -> Iterator[str]:
    """The address of a running proxy."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
            request = (self.path, headers, body)
            fault = made.draw()
            if fault == "cut_half":
                made.forward_half(*request)
            if fault.startswith("late"):
                made.later(*request)
            if fault == "delay":
                time.sleep(0.2)
            if fault == "twice":
                made.later(*request)
            if fault in ("cut", "cut_half", "late"):
                return self.cut()
            if fault == "late_and_answered_502":
                return self.answer(502, b"<html>busy</html>")
            if fault == "rubbish":
                return self.answer(200, b"<html>welcome</html>")
            answer = made.forward(*request)
            return self.cut() if fault == "cut_answer" else self.answer(*answer)

        def answer(self, status: int, text: bytes) -> None:
            with suppress(OSError):
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        def cut(self) -> None:
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
