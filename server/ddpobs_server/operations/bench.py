"""`ddpobs-server bench`: what this machine's collector takes, over HTTP, acknowledged after commit.

*Flood*: some clients send batches of 5,000 spans as fast as they are acknowledged. *Job*: so many ranks each send a
batch every flush, as a training of that size does. Clients are processes on the same machine, and share its cores.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httptools
import numpy as np
import zstandard

from ddpobs import wire

FLOOD_STEPS, FLOOD_BUCKETS = 250, 20
JOB_STEPS_A_SECOND, JOB_BUCKETS, JOB_FLUSH_S = 2, 40, 2.0
SERVE = (sys.executable, "-m", "ddpobs_server.app", "serve")
_LOOK_S = 0.2
_ATTEMPT = "a" * 16
_context = multiprocessing.get_context("fork")


class BenchError(RuntimeError):
    """Nothing could be measured; says why."""


@dataclass(frozen=True)
class Load:
    """What is sent.

    Attributes:
        ranks: How many sources.
        batches: How many each sends.
        steps: Steps of a batch.
        buckets: Bucket spans of a step.
        every_s: A rank's batches are so far apart; 0 for as fast as they are acknowledged.
        clients: Processes that send.
    """

    ranks: int
    batches: int
    steps: int
    buckets: int
    every_s: float
    clients: int

    @property
    def spans(self) -> int:
        """Of all batches."""
        return self.ranks * self.batches * self.steps * self.buckets


def flood(clients: int, batches: int) -> Load:
    """Every client is one rank in a hurry."""
    return Load(clients, batches, FLOOD_STEPS, FLOOD_BUCKETS, 0.0, clients)


def job(ranks: int, seconds: float, clients: int) -> Load:
    """A training of that many ranks, two steps a second, 40 buckets, a flush every two seconds."""
    steps = int(JOB_STEPS_A_SECOND * JOB_FLUSH_S)
    return Load(ranks, max(1, round(seconds / JOB_FLUSH_S)), steps, JOB_BUCKETS, JOB_FLUSH_S, clients)


def batch(load: Load, rank: int, seq: int) -> wire.Batch:
    """Steps as a training's: compute and communication of each bucket vary by themselves, to the microsecond."""
    random = np.random.default_rng([rank, seq])
    step = np.arange(seq * load.steps, (seq + 1) * load.steps)
    shape = (load.steps, load.buckets)
    compute = random.gamma(20.0, 150.0, shape).astype(np.int64) * 1000
    comm = random.gamma(4.0, 500.0, shape).astype(np.int64) * 1000
    start = step * 500_000_000 + random.integers(0, 1000, load.steps) * 1000
    ready = start[:, None] + 30_000_000 + compute.cumsum(axis=1)
    launched = ready + random.integers(5, 60, shape) * 1000
    zeros = np.zeros(ready.size, np.int64)
    return wire.Batch(
        version=wire.VERSION,
        run="benchmark",
        attempt=_ATTEMPT,
        source=f"{rank:016x}",
        seq=seq,
        rank=rank,
        world_size=load.ranks,
        emitted=ready.size * (seq + 1),
        dropped=0,
        anchor=wire.Anchor(wall_ns=time.time_ns(), monotonic_ns=time.monotonic_ns()),
        steps=_steps(step, start, ready[:, -1] - start, random),
        spans=wire.Spans(
            step=np.repeat(step, load.buckets),
            module=zeros,
            revision=zeros,
            bucket=np.tile(np.arange(load.buckets), load.steps),
            ready_ns=ready.reshape(-1),
            launched_ns=launched.reshape(-1),
            started_ns=zeros + wire.UNKNOWN,
            done_ns=(launched + comm).reshape(-1),
        ),
        pulse=wire.Pulse(at_ns=time.monotonic_ns(), phase="backward", step=int(step[-1]), module=0, bucket=1),
    )


def _steps(step: wire.Ints, start: wire.Ints, backward: wire.Ints, random: np.random.Generator) -> wire.Steps:
    phases = {f"{phase}_ns": random.integers(1000, 20_000, len(step)) * 1000 for phase in wire.PHASES}
    phases["backward_ns"] = backward
    own = {f"own_{phase}_ns": phases[f"{phase}_ns"] for phase in wire.OWN_PHASES}
    return wire.Steps(
        step=step,
        collective=step,
        start_ns=start,
        end_ns=start + sum(phases.values()),
        own_ns=np.sum(list(own.values()), axis=0),
        comm_ns=phases["exposed_comm_ns"],
        micro_steps=np.ones(len(step), np.int64),
        samples=np.full(len(step), 32),
        flags=np.full(len(step), wire.SYNCHRONISED),
        **phases,
        **own,
    )


def measure(load: Load, database_url: str | None = None) -> dict[str, float]:
    """Send a load to a collector of our own.

    Args:
        load: What is sent.
        database_url: Where it stores; None for a SQLite file in a temporary folder.

    Returns:
        What `drive` tells, `lost` spans, and `bytes_per_span` of a SQLite file.

    Raises:
        BenchError: The collector did not start, or did not acknowledge a batch.
    """
    with tempfile.TemporaryDirectory() as name, senders(load.clients, send, load) as pipes:
        folder = Path(name)
        with collector(folder, database_url or f"sqlite:///{folder}/runs.db") as (process, address):
            found = drive(pipes, process.pid, address)
            found["lost"] = found.pop("spans") - stored(address)
        if database_url is None:
            found["bytes_per_span"] = sum(path.stat().st_size for path in folder.glob("runs.db*")) / load.spans
        return found


@dataclass(frozen=True)
class Sent:
    """What one client sent.

    Attributes:
        spans: In acknowledged batches.
        acknowledged_s: How long each acknowledgement took, by whatever it is of interest for.
    """

    spans: int
    acknowledged_s: dict[str, list[float]]


@contextmanager
def senders(count: int, send: Callable[..., Sent], *arguments: object) -> Iterator[list[Connection]]:
    """Processes that each call `send(number, address, *arguments)`.

    `address` waits until `drive` tells the collector's: what is done before it is called is not measured.
    """
    pipes: list[Connection] = []
    clients = []
    for number in range(count):
        ours, theirs = _context.Pipe()
        clients.append(_context.Process(target=_client, args=(theirs, send, number, *arguments)))
        clients[-1].start()
        theirs.close()  # Nobody but the client holds that end: where it crashes, ours tells.
        pipes.append(ours)
    try:
        yield pipes
    finally:
        for client in clients:
            client.kill()
            client.join()


def drive(pipes: Sequence[Connection], pid: int, address: str) -> dict[str, float]:
    """Have the clients send to the collector with that process id, and look at its memory and processor time.

    Returns:
        `spans` that were acknowledged, `spans_per_s`, `ack_p50_ms`, `ack_p99_ms` (of parts, too), `cpu_ns_per_span` and
        `cpu_cores` (the collector's), `resident_mb` at the end, what it was at each quarter of the time before, and
        `resident_ratio`, the end over the middle.

    Raises:
        BenchError: A batch was not acknowledged.
    """
    if failed := [told for told in map(_told, pipes) if told is not None]:
        raise BenchError(failed[0])
    before, began = _processor_s(pid), time.monotonic()
    for ours in pipes:
        ours.send(address)
    seen: list[float] = []
    answers: list[Sent | str] = []
    waited_for = list(pipes)
    while waited_for:
        if began + _LOOK_S * len(seen) <= time.monotonic():
            seen.append(_resident_mb(pid))
        answered = wait(waited_for, _LOOK_S)
        answers += [_told(ours) for ours in waited_for if ours in answered]
        waited_for = [ours for ours in waited_for if ours not in answered]
    took = time.monotonic() - began
    if failed := [answer for answer in answers if isinstance(answer, str)]:
        raise BenchError(failed[0])
    sent = [answer for answer in answers if isinstance(answer, Sent)]
    used, resident = _processor_s(pid) - before, _resident_mb(pid)
    spans = sum(one.spans for one in sent)
    took_ms = {
        part: 1e3 * np.concatenate([one.acknowledged_s[part] for one in sent]) for part in sent[0].acknowledged_s
    }
    acknowledged = np.concatenate(list(took_ms.values()))
    return {
        "spans": float(spans),
        "spans_per_s": spans / took,
        "ack_p50_ms": float(np.percentile(acknowledged, 50)),
        "ack_p99_ms": float(np.percentile(acknowledged, 99)),
        **{f"ack_p99_{part}_ms": float(np.percentile(took, 99)) for part, took in took_ms.items() if part},
        "cpu_ns_per_span": 1e9 * used / spans,
        "cpu_cores": used / took,
        "resident_quarter_mb": seen[len(seen) // 4],
        "resident_half_mb": seen[len(seen) // 2],
        "resident_three_quarters_mb": seen[len(seen) * 3 // 4],
        "resident_mb": resident,
        "resident_ratio": resident / seen[len(seen) // 2],
    }


@contextmanager
def collector(
    folder: Path, database_url: str, command: Sequence[str] = SERVE
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A collector process and its address; ended at the exit, which checkpoints a SQLite file.

    Args:
        folder: For its log.
        database_url: Where it stores.
        command: Starts it; the default is ours.

    Raises:
        BenchError: It did not start; holds its log.
    """
    log = folder / "log"
    # Its own defaults, whatever the collector beside it is told: a token, say, or certificates.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DDPOBS_")}
    environ |= {"DDPOBS_SERVER_PORT": "0", "DDPOBS_SERVER_DATABASE_URL": database_url}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=folder, env=environ)
    try:
        deadline = time.monotonic() + 60
        while not (found := re.search(r"running on (http://[^ ]+)", log.read_text())):
            if time.monotonic() > deadline or process.poll() is not None:
                raise BenchError(f"no collector: {log.read_text()}")
            time.sleep(0.05)
        yield process, found[1]
    finally:
        process.terminate()
        process.wait(60)


def fsyncs_a_second(folder: Path, size_bytes: int, count: int) -> float:
    """Appends of `size_bytes`, each followed by an fsync."""
    block = os.urandom(size_bytes)
    with (folder / "bare").open("wb", buffering=0) as out:
        began = time.perf_counter()
        for _ in range(count):
            out.write(block)
            os.fsync(out.fileno())
        return count / (time.perf_counter() - began)


def _told(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        raise BenchError("a client ended without an answer") from None


def _client(pipe: Connection, send: Callable[..., Sent], *arguments: object) -> None:
    number, *rest = arguments

    def address() -> str:
        pipe.send(None)
        told: str = pipe.recv()
        return told

    try:
        pipe.send(send(number, address, *rest))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def send(number: int, address: Callable[[], str], load: Load) -> Sent:
    """Send the batches of every `clients`-th rank, each rank's evenly apart where it is in no hurry.

    Those of a flood are made before it begins, a job's just before they are due: ten minutes of a large one fill no
    memory. A job's batch takes from when it was due until it is acknowledged, whatever made the client late.
    """
    ranks = range(number, load.ranks, load.clients)
    keys = [(rank, seq) for seq in range(load.batches) for rank in ranks]
    bodies: Iterator[bytes] = (zstandard.compress(wire.encode(batch(load, rank, seq)), 1) for rank, seq in keys)
    if not load.every_s:
        bodies = iter(list(bodies))
    line = _Line(urlsplit(address()).netloc)
    took = []
    began = time.monotonic()
    for place, (rank, seq) in enumerate(keys):
        body = next(bodies)
        due = time.monotonic()
        if load.every_s:
            # The ranks' batches are evenly spread, too.
            due = began + load.every_s * (seq + (place % len(ranks)) / len(ranks))
            time.sleep(max(0.0, due - time.monotonic()))
        line.put(f"/api/v1/runs/benchmark/sources/{rank:016x}/batches/{seq}", body)
        took.append(time.monotonic() - due)
    return Sent(len(keys) * load.steps * load.buckets, {"": took})


class _Line:
    """A connection with as little of its own as can be: whatever a client takes, the collector does not have.

    Args:
        netloc: Host and port.
    """

    def __init__(self, netloc: str) -> None:
        host, _, port = netloc.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._head = f"Host: {netloc}\r\nContent-Type: {wire.MSGPACK}\r\nContent-Encoding: zstd\r\n"
        self._parser, self._text, self._ended = httptools.HttpResponseParser(self), b"", False

    def put(self, path: str, body: bytes) -> None:
        """Send a batch and wait for its acknowledgement.

        Raises:
            BenchError: It was another answer, or none.
        """
        head = f"PUT {path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode() + body)
        self._text, self._ended = b"", False
        while not self._ended:
            if not (read := self._socket.recv(65_536)):
                raise BenchError("the collector closed the connection")
            self._parser.feed_data(read)
        if (status := self._parser.get_status_code()) != 201:
            raise BenchError(f"a batch was answered {status}: {self._text[:300]!r}")

    def on_body(self, part: bytes) -> None:
        """Called by the parser."""
        self._text += part

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._ended = True


def stored(address: str) -> int:
    """Bucket spans that the collector's own sums know of."""
    with urllib.request.urlopen(f"{address}/api/v1/runs/benchmark/buckets", timeout=60) as answer:
        return sum(bucket["steps"] for bucket in json.loads(answer.read())["buckets"])


def _resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
