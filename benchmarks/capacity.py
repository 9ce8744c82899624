"""Throughput of a collector on this machine, over HTTP, acknowledged after the commit.

    python -m benchmarks.capacity [--ranks 1024] [--seconds 60] [--batches 100] [--clients 8] [--database-url URL]

*Flood*: some clients each send batches of 5,000 spans without a pause. *Job*: each of many ranks sends a batch at every
flush, as in a training of that size. Clients are processes on the same machine, and share its cores.
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
from typing import Annotated, Any
from urllib.parse import urlsplit

import httptools
import numpy as np
import typer
import zstandard
from ddpobs_server.settings import printable_url, sqlite_file
from ddpobs_server.store import Store

from benchmarks.loads import Load, batch, flood, job
from ddpobs import wire

SERVE = (sys.executable, "-m", "ddpobs_server.app", "serve")
_SAMPLE_S = 0.2
_context = multiprocessing.get_context("fork")


class CapacityError(RuntimeError):
    """The measurement failed; the message has the reason."""


def measure(load: Load, database_url: str | None = None) -> dict[str, float]:
    """Start a collector and send a load to it.

    Args:
        load: The load.
        database_url: The collector's database; None for a SQLite file in a temporary folder.

    Returns:
        The results of `drive`, the number of `lost` spans, and `bytes_per_span` of a SQLite file.

    Raises:
        CapacityError: The database has runs, the collector did not start, or it did not acknowledge a batch.
    """
    if database_url is not None:
        _refuse_used(database_url)
    with tempfile.TemporaryDirectory() as name, senders(load.clients, send, load) as pipes:
        folder = Path(name)
        with collector(folder, database_url or f"sqlite:///{folder}/runs.db") as (process, address):
            results = drive(pipes, process.pid, address)
            results["lost"] = results.pop("spans") - stored(address)
        if database_url is None:
            results["bytes_per_span"] = sum(path.stat().st_size for path in folder.glob("runs.db*")) / load.spans
        return results


def _refuse_used(database_url: str) -> None:
    """Refuse a database with runs: the load would stay in it, beside real runs."""
    file = sqlite_file(database_url)
    if file is not None and not file.exists():
        return
    store = Store(database_url, read_only=True)
    try:
        if store.revisions()[0] is not None and store.has_runs():
            database = printable_url(database_url)
            raise CapacityError(f"{database} has runs: name an empty database, or none for a temporary file")
    finally:
        store.close()


@dataclass(frozen=True)
class Sent:
    """Result of a client.

    Attributes:
        spans: Spans in acknowledged batches.
        acknowledged_s: Duration of each acknowledgement, by a name for the kind of batch.
    """

    spans: int
    acknowledged_s: dict[str, list[float]]


@contextmanager
def senders(count: int, send: Callable[..., Sent], *arguments: object) -> Iterator[list[Connection]]:
    """Processes that each call `send(number, address, *arguments)`.

    `address` waits until `drive` sends the collector's address. Work before that call is not measured.
    """
    pipes: list[Connection] = []
    clients = []
    for number in range(count):
        pipe, client_end = _context.Pipe()
        clients.append(_context.Process(target=_client, args=(client_end, send, number, *arguments)))
        clients[-1].start()
        client_end.close()  # Only the client holds this end now, so a crash of the client closes the pipe.
        pipes.append(pipe)
    try:
        yield pipes
    finally:
        for client in clients:
            client.kill()
            client.join()


def drive(pipes: Sequence[Connection], pid: int, address: str) -> dict[str, float]:
    """Start the clients, and measure memory and processor time of the collector with this process id.

    Returns:
        `spans` acknowledged, `spans_per_s`, `ack_p50_ms` and `ack_p99_ms` (also by kind of batch), the collector's
        `cpu_ns_per_span` and `cpu_cores`, `resident_mb` at the end and at each earlier quarter of the time, and
        `resident_ratio`, the end relative to the middle.

    Raises:
        CapacityError: A batch was not acknowledged.
    """
    _raise_failure([_receive(pipe) for pipe in pipes])
    cpu_before, began = _processor_s(pid), time.monotonic()
    for pipe in pipes:
        pipe.send(address)
    resident_mb: list[float] = []
    answers: list[Sent | str] = []
    open_pipes = list(pipes)
    while open_pipes:
        if began + _SAMPLE_S * len(resident_mb) <= time.monotonic():
            resident_mb.append(_resident_mb(pid))
        ready = wait(open_pipes, _SAMPLE_S)
        answers += [_receive(pipe) for pipe in open_pipes if pipe in ready]
        open_pipes = [pipe for pipe in open_pipes if pipe not in ready]
    elapsed_s = time.monotonic() - began
    _raise_failure(answers)
    results = [answer for answer in answers if isinstance(answer, Sent)]
    cpu_s, final_mb = _processor_s(pid) - cpu_before, _resident_mb(pid)
    spans = sum(result.spans for result in results)
    return {
        "spans": float(spans),
        "spans_per_s": spans / elapsed_s,
        **_acknowledgements(results),
        "cpu_ns_per_span": 1e9 * cpu_s / spans,
        "cpu_cores": cpu_s / elapsed_s,
        "resident_quarter_mb": resident_mb[len(resident_mb) // 4],
        "resident_half_mb": resident_mb[len(resident_mb) // 2],
        "resident_three_quarters_mb": resident_mb[len(resident_mb) * 3 // 4],
        "resident_mb": final_mb,
        "resident_ratio": final_mb / resident_mb[len(resident_mb) // 2],
    }


def _raise_failure(answers: Sequence[Sent | str | None]) -> None:
    for answer in answers:
        if isinstance(answer, str):
            raise CapacityError(answer)


def _acknowledgements(results: Sequence[Sent]) -> dict[str, float]:
    """Percentiles of the acknowledgement times, over all batches and by kind."""
    by_kind_ms = {
        kind: 1e3 * np.concatenate([result.acknowledged_s[kind] for result in results])
        for kind in results[0].acknowledged_s
    }
    all_ms = np.concatenate(list(by_kind_ms.values()))
    return {
        "ack_p50_ms": float(np.percentile(all_ms, 50)),
        "ack_p99_ms": float(np.percentile(all_ms, 99)),
        **{f"ack_p99_{kind}_ms": float(np.percentile(times_ms, 99)) for kind, times_ms in by_kind_ms.items() if kind},
    }


@contextmanager
def collector(
    folder: Path, database_url: str, command: Sequence[str] = SERVE
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A collector process and its address. It ends at the exit, which checkpoints a SQLite file.

    Args:
        folder: Folder for its log.
        database_url: Its database.
        command: Command that starts it; by default this version's.

    Raises:
        CapacityError: It did not start; the message has its log.
    """
    log = folder / "log"
    # Default settings: ignore the environment's settings for another collector, such as a token or certificates.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DDPOBS_")}
    environ |= {"DDPOBS_SERVER_PORT": "0", "DDPOBS_SERVER_DATABASE_URL": database_url}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=folder, env=environ)
    try:
        deadline = time.monotonic() + 60
        while not (match := re.search(r"(?:ddpobs-server:|running on) (http://[^ ,]+)", log.read_text())):
            if time.monotonic() > deadline or process.poll() is not None:
                raise CapacityError(f"no collector: {log.read_text()}")
            time.sleep(0.05)
        yield process, match[1]
    finally:
        process.terminate()
        process.wait(60)


def fsyncs_a_second(folder: Path, size_bytes: int, count: int) -> float:
    """Rate of appends of `size_bytes`, each followed by an fsync."""
    block = os.urandom(size_bytes)
    with (folder / "bare").open("wb", buffering=0) as out:
        began = time.perf_counter()
        for _ in range(count):
            out.write(block)
            os.fsync(out.fileno())
        return count / (time.perf_counter() - began)


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        raise CapacityError("a client ended without an answer") from None


def _client(pipe: Connection, send: Callable[..., Sent], *arguments: object) -> None:
    number, *send_arguments = arguments

    def address() -> str:
        pipe.send(None)
        received: str = pipe.recv()
        return received

    try:
        pipe.send(send(number, address, *send_arguments))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def send(number: int, address: Callable[[], str], load: Load) -> Sent:
    """Send the batches of every `clients`-th rank, spread evenly over time in a job.

    A flood's batches are made before it begins. A job's batches are made just before they are due, because ten minutes
    of a large job would fill memory. A job's acknowledgement time begins when the batch is due, even if the client was
    late.
    """
    ranks = range(number, load.ranks, load.clients)
    keys = [(rank, seq) for seq in range(load.batches) for rank in ranks]
    bodies: Iterator[bytes] = (zstandard.compress(wire.encode(batch(load, rank, seq)), 1) for rank, seq in keys)
    if not load.every_s:
        bodies = iter(list(bodies))
    connection = _HttpConnection(urlsplit(address()).netloc)
    acknowledged_s = []
    began = time.monotonic()
    for index, (rank, seq) in enumerate(keys):
        body = next(bodies)
        due = time.monotonic()
        if load.every_s:
            # The ranks are spread evenly over the period too.
            due = began + load.every_s * (seq + (index % len(ranks)) / len(ranks))
            time.sleep(max(0.0, due - time.monotonic()))
        connection.put(f"/api/v1/runs/{load.run_of(rank)}/sources/{rank:016x}/batches/{seq}", body)
        acknowledged_s.append(time.monotonic() - due)
    return Sent(len(keys) * load.steps * load.buckets, {"": acknowledged_s})


class _HttpConnection:
    """A minimal HTTP connection: the client takes processor time from the collector on the same machine.

    Args:
        netloc: Host and port.
    """

    def __init__(self, netloc: str) -> None:
        host, _, port = netloc.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._head = f"Host: {netloc}\r\nContent-Type: {wire.MSGPACK}\r\nContent-Encoding: zstd\r\n"
        self._parser, self._text, self._complete = httptools.HttpResponseParser(self), b"", False

    def put(self, path: str, body: bytes) -> None:
        """Send a batch and wait for its acknowledgement.

        Raises:
            CapacityError: The status is not 201, or the collector closed the connection.
        """
        head = f"PUT {path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode() + body)
        self._text, self._complete = b"", False
        while not self._complete:
            if not (data := self._socket.recv(65_536)):
                raise CapacityError("the collector closed the connection")
            self._parser.feed_data(data)
        if (status := self._parser.get_status_code()) != 201:
            raise CapacityError(f"a batch was answered {status}: {self._text[:300]!r}")

    def on_body(self, part: bytes) -> None:
        """Callback of the parser."""
        self._text += part

    def on_message_complete(self) -> None:
        """Callback of the parser."""
        self._complete = True


def stored(address: str, run: str = "benchmark") -> int:
    """Bucket spans of a run in the collector's own sums."""
    with urllib.request.urlopen(f"{address}/api/v1/runs/{run}/buckets", timeout=60) as response:
        return sum(bucket["steps"] for bucket in json.loads(response.read())["buckets"])


def _resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(
    ranks: Annotated[int, typer.Option(min=0, help="Ranks of a simulated job; 0 floods the collector instead.")] = 0,
    seconds: Annotated[float, typer.Option(min=1, help="Duration of the simulated job.")] = 60.0,
    batches: Annotated[int, typer.Option(min=1, help="Batches of 5,000 spans per client in a flood.")] = 100,
    clients: Annotated[int, typer.Option(min=1, help="Number of sending processes.")] = 8,
    database_url: Annotated[
        str | None, typer.Option(help="Empty database for the measurement. Default: a new SQLite file.")
    ] = None,
) -> None:
    """Measure the throughput of a collector on this machine, which also runs the clients."""
    try:
        results = measure(job(ranks, seconds, clients) if ranks else flood(clients, batches), database_url)
    except CapacityError as error:
        typer.echo(f"capacity: {error}", err=True)
        raise typer.Exit(1) from None
    for name, value in results.items():
        typer.echo(f"{name:>16}  {value:,.2f}")
    if results["lost"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
