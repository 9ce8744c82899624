"""Parts of the fault tests: ranks that keep sending, a collector that can be killed, a proxy that misbehaves.

The ranks send through the real exporter. The collector is the real command. Tests count every stored span.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from benchmarks.rig import collector as collectors
from benchmarks.rig import patience
from benchmarks.rig.ports import free_port
from ddpobs import wire
from ddpobs.config import TelemetryConfig
from ddpobs.export.exporter import Exporter
from ddpobs.export.identity import Envelope, Identity
from ddpobs.export.spool import Spool
from tests.support.server.batches import ATTEMPT, get, source_of, spans, steps

BUCKETS = 2
WEIGHT = 1 + BUCKETS
"""Records of a step: the step and its bucket spans."""
_STEP_S = 0.02
_MAX_SPOOLED = 200
"""Maximum number of batches, five seconds of four ranks. Above it the ranks pause, so that the collector catches up."""


class Ranks:
    """Ranks that finish a step every few milliseconds and report it through the real exporter.

    Attributes:
        steps: Number of steps that each rank has offered; step numbers begin at 0.
        exporters: One per rank.
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
        """End the training and flush. Batches that the collector did not take stay in the spool."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        with ThreadPoolExecutor(len(self.exporters)) as pool:
            list(pool.map(Exporter.close, self.exporters))

    def step(self, count: int = 1) -> None:
        """Finish `count` steps on every rank."""
        for _ in range(count):
            for rank, exporter in enumerate(self.exporters):
                exporter.offer(self.steps[rank], WEIGHT)
                self.steps[rank] += 1

    def _train(self) -> None:
        while not self._ended.wait(_STEP_S):
            if count_spooled(self) < _MAX_SPOOLED:
                self.step()


def _encode(records: Sequence[object], envelope: Envelope) -> wire.Batch:
    numbers = np.array(records, np.int64)
    return wire.Batch(
        version=wire.VERSION,
        **vars(envelope),
        steps=steps(0, len(numbers), step=numbers, collective=numbers),
        spans=spans(0, len(numbers), step=np.repeat(numbers, BUCKETS)),
    )


class RestartableCollector:
    """A collector that can be killed and started again with the same port and database.

    Args:
        folder: Folder of its log, and of its database unless the settings name a database.
        start: Start it now. Otherwise `start()` starts it.
        settings: Settings of the collector.
    """

    def __init__(self, folder: Path, *, start: bool = True, **settings: Any) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._settings = folder, settings
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._stack = ExitStack()
        if start:
            self.start()

    def __enter__(self) -> RestartableCollector:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self) -> None:
        """Start it, and return once it is ready."""
        context = collectors.collector(self._folder, port=self.port, **self._settings)
        self.running = self._stack.enter_context(context)

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End it by a signal: SIGKILL ends it without a flush, SIGTERM in order, with exit status 0."""
        assert self.running.end(number) == (0 if number is signal.SIGTERM else -number)

    def batches(self, outcome: str = "stored") -> float:
        """Return the number of batches with this outcome since its start, from its own metrics."""
        metrics = httpx.get(f"{self.url}/metrics?only=collector").text
        match = re.search(rf'^ddpobs_server_batches_total{{outcome="{outcome}"}} (\S+)$', metrics, re.MULTILINE)
        assert match, metrics
        return float(match[1])

    def wait_for_batches(self, count: int, outcome: str = "stored") -> None:
        """Wait until `count` more batches had this outcome."""
        target = self.batches(outcome) + count
        patience.until(lambda: self.batches(outcome) >= target)


def push(spool: Path, url: str) -> str:
    """Send the whole spool with `ddpobs push`, and return its output."""
    command = [str(Path(sys.executable).with_name("ddpobs")), "push", str(spool), "--collector", url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def stored_spans(url: str, run: str) -> Counter[tuple[int, int, int]]:
    """Count the (rank, step, bucket) of all spans that the collector returns."""
    columns = get(url, f"/runs/{run}/spans")["columns"]
    return Counter(zip(columns["rank"], columns["step"], columns["bucket"], strict=True))


def assert_stored_once(url: str, run: str, finished: Sequence[int]) -> None:
    """Assert that every span and step is stored once, and that the sums include each once.

    Args:
        url: The collector's address.
        run: The run.
        finished: Number of steps that each rank finished.
    """
    expected = Counter(
        (rank, step, bucket)
        for rank, count in enumerate(finished)
        for step in range(count)
        for bucket in range(BUCKETS)
    )
    stored = stored_spans(url, run)
    assert stored == expected, f"lost {list(expected - stored)[:5]}, too many {list(stored - expected)[:5]}"
    columns = get(url, f"/runs/{run}/steps")["columns"]
    assert Counter(columns["rank"]) == Counter(dict(enumerate(finished)))
    assert len(set(zip(columns["rank"], columns["step"], strict=True))) == sum(finished)
    assert_sums(url, run, expected)


def is_consistent(url: str, run: str) -> bool:
    """Whether spans, steps and sums describe the same steps, each once.

    False also where a batch arrives between the reads.
    """
    spans_stored = stored_spans(url, run)
    assert set(spans_stored.values()) == {1}
    with suppress(AssertionError):
        assert_sums(url, run, spans_stored)
        return True
    return False


def assert_sums(url: str, run: str, spans_stored: Counter[tuple[int, int, int]]) -> None:
    """Assert that the sums by bucket and by rank match the stored spans."""
    buckets = {bucket["bucket"]: bucket["steps"] for bucket in get(url, f"/runs/{run}/buckets")["buckets"]}
    assert buckets == Counter(bucket for _, _, bucket in spans_stored)
    ranks = {rank["rank"]: BUCKETS * rank["steps"] for rank in get(url, f"/runs/{run}/ranks")["ranks"]}
    assert ranks == Counter(rank for rank, _, _ in spans_stored)


def count_spooled(ranks: Ranks) -> int:
    """Return the number of batches in the ranks' spool."""
    return sum(1 for _ in Spool(ranks.spool, 1).batches())


class Proxy:
    """A proxy before some collectors: uses the next collector where the first does not answer, and injects faults.

    Attributes:
        faults: Possible faults of a `PUT`; each request draws one. If empty, every request is passed on.
        fault_counts: Number of requests by fault.
    """

    def __init__(self, *upstreams: str, faults: Sequence[str] = (), seed: int = 0) -> None:
        self.upstreams = [(split.hostname or "", split.port) for split in map(urlsplit, upstreams)]
        self.faults, self.fault_counts = faults, Counter[str]()
        self._random = random.Random(seed)
        self._late: list[threading.Thread] = []

    def settle(self) -> None:
        """Wait for the requests that are passed on late."""
        while self._late:
            self._late.pop().join()

    def draw_fault(self) -> str:
        """Draw the fault of a request."""
        fault = self._random.choice(self.faults) if self.faults else "pass"
        self.fault_counts[fault] += 1
        return fault

    def forward(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        """Pass a request on, and return the answer of the first collector that answers."""
        for host, port in self.upstreams:
            connection = http.client.HTTPConnection(host, port, timeout=patience.HANG_S)
            try:
                connection.request("PUT", path, body, headers)
                answer = connection.getresponse()
                return answer.status, answer.read()
            except (OSError, http.client.HTTPException):
                continue
            finally:
                connection.close()
        return 502, b"<html>no upstream</html>"

    def forward_half(self, path: str, headers: dict[str, str], body: bytes) -> None:
        """Send the first half of a request, and close the connection."""
        with suppress(OSError), socket.create_connection(self.upstreams[0], 30) as connection:
            head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            text = f"PUT {path} HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode()
            connection.sendall(text + body[: len(body) // 2])

    def forward_late(self, *request: Any) -> None:
        """Pass a request on after a delay, so that later requests overtake it."""
        thread = threading.Timer(self._random.uniform(0.1, 0.6), self.forward, request)
        thread.daemon = True
        thread.start()
        self._late.append(thread)


FAULTS = ("pass", "cut", "cut_half", "cut_answer", "delay", "twice", "late", "late_and_answered_502", "rubbish")
_HOP = ("connection", "content-length", "accept-encoding")


@contextmanager
def serving(proxy: Proxy) -> Iterator[str]:
    """Run a proxy, and yield its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
            request = (self.path, headers, body)
            fault = proxy.draw_fault()
            if fault == "cut_half":
                proxy.forward_half(*request)
            if fault.startswith("late"):
                proxy.forward_late(*request)
            if fault == "delay":
                time.sleep(0.2)
            if fault == "twice":
                proxy.forward_late(*request)
            if fault in ("cut", "cut_half", "late"):
                return self.cut()
            if fault == "late_and_answered_502":
                return self.answer(502, b"<html>busy</html>")
            if fault == "rubbish":
                return self.answer(200, b"<html>welcome</html>")
            answer = proxy.forward(*request)
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
