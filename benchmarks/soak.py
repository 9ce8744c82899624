"""Run a collector for minutes under faults drawn at random, then compare its store with the acknowledgements.

    python -m benchmarks.soak [--seconds 600] [--seed 0] [--postgres] [--json FILE] [--smoke]

The workspace `quiet` sends batches of 400 spans and repeats each until it is acknowledged, as a rank does. The
workspace `loud` sends batches that are costly to keep. Every few seconds a fault begins: the collector is killed, its
disk has too little free space, its database stops or its file is locked, its file is moved away and back, bodies stay
unfinished, or answers stay unread.

At the end every acknowledged span must be stored once. The memory must stay below its bound and flat, the latency of
`quiet` outside of outages within its bound. Clock steps are not drawn: the collector's clock cannot be set alone. Exits
with 1 if a condition fails.
"""

from __future__ import annotations

import argparse
import json
import random
import sqlite3
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from ddpobs_server.store import Store

from benchmarks.tenants import LOAD, Background, Collector, Tenant, hostile_batches, tokens
from ddpobs import wire
from tests import databases

MEMORY_BYTES = 1_500_000_000
"""Bound on the collector's peak memory under this load."""
P99_S, FLAT_RATIO = 2.0, 1.5
"""Bound on the latency outside of outages, and on the memory of the second half relative to the first."""
_PERIOD_S = 0.1
_OUTAGE_S = 3.0
_SETTINGS = {"max_under_way_mb": 256, "lost_after_s": 5}


@dataclass
class Record:
    """Figures of a soak.

    Attributes:
        acknowledged: Number of batches.
        latencies_s: (time, seconds) of each acknowledged batch.
        outages: (begin, end) of each fault that stops the store.
        memory: (time, bytes) of the collector's resident memory.
        peak_bytes: Largest peak of any of its processes.
        faults: Number of faults by kind.
    """

    acknowledged: int = 0
    latencies_s: list[tuple[float, float]] = field(default_factory=list)
    outages: list[tuple[float, float]] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    peak_bytes: int = 0
    faults: dict[str, int] = field(default_factory=dict)


class Soak:
    """The collector, its tenants and its faults.

    Args:
        collector: The collector.
        tenants: `quiet` and `loud`.
        server: PostgreSQL's server; None for a SQLite file.
        seed: Of the faults.
    """

    def __init__(self, collector: Collector, tenants: tuple[Tenant, Tenant], server: Any, seed: int) -> None:
        self._collector, self._server = collector, server
        self._quiet, self._loud = tenants
        self._random = random.Random(seed)
        self._hostile = 0
        self.record = Record()

    def send(self, client: httpx.Client, number: int) -> None:
        """Send a batch of `quiet` until it is acknowledged."""
        payload = self._quiet.batch(0, number)
        began = time.monotonic()
        while True:
            sending = time.monotonic()
            with suppress(httpx.HTTPError):
                if self._quiet.put(client, payload).status_code in (200, 201):
                    break
            time.sleep(0.2)
        self.record.acknowledged += 1
        self.record.latencies_s.append((sending, time.monotonic() - began))
        time.sleep(_PERIOD_S)

    def watch(self, client: httpx.Client, _number: int) -> None:
        """Scrape and read both workspaces, and record the memory."""
        self._measure_memory()
        for tenant in (self._quiet, self._loud):
            for path in ("/metrics", "/api/v1/runs", f"/api/v1/runs/{tenant.run}/diagnostics"):
                client.get(self._collector.url + path, headers=tenant.headers)
        client.get(f"{self._collector.url}/api/v1/runs/hostile/unused", headers=self._loud.headers)
        time.sleep(1)

    def attack(self, client: httpx.Client, _number: int) -> None:
        """Send batches of `loud` that are costly to keep."""
        self._hostile += 1
        for payload in hostile_batches(self._loud, self._hostile):
            self._loud.put(client, payload)
        time.sleep(0.5)

    def fault(self, seconds: float) -> None:
        """Draw a fault, and end it after some seconds."""
        kinds = [self._kill, self._fill_disk, self._stop_database, self._unfinished_bodies, self._unread_answers]
        if self._server is None:
            kinds.append(self._move_file)
        kind = self._random.choice(kinds)
        name = kind.__name__.strip("_").replace("_", " ")
        self.record.faults[name] = self.record.faults.get(name, 0) + 1
        kind(seconds)

    def _outage(self, began: float) -> None:
        self.record.outages.append((began - 1, time.monotonic() + _OUTAGE_S))

    def _restart(self, **settings: object) -> None:
        self._measure_memory()
        self._collector.end(kill=True)
        self._collector.start(**settings)

    def _kill(self, _seconds: float) -> None:
        began = time.monotonic()
        self._restart()
        self._outage(began)

    def _fill_disk(self, seconds: float) -> None:
        began = time.monotonic()
        self._restart(keep_free_mb=10**9)
        time.sleep(seconds)
        self._restart()
        self._outage(began)

    def _stop_database(self, seconds: float) -> None:
        began = time.monotonic()
        if self._server is not None:
            databases.stop(self._server, "immediate")
            time.sleep(seconds)
            databases.start(self._server)
        else:
            with sqlite3.connect(self._file, isolation_level=None, timeout=30) as connection:
                connection.execute("BEGIN IMMEDIATE")
                time.sleep(seconds)
                connection.execute("ROLLBACK")
            connection.close()
        self._outage(began)

    def _move_file(self, seconds: float) -> None:
        """Move the file away and back. The collector is killed before, so that no batch is on its way."""
        began = time.monotonic()
        files = [path for path in self._file.parent.glob(f"{self._file.name}*") if path.is_file()]
        self._measure_memory()
        self._collector.end(kill=True)
        away = self._file.parent / "away"
        away.mkdir(exist_ok=True)
        for path in files:
            path.rename(away / path.name)
        time.sleep(seconds)
        for path in files:
            (away / path.name).rename(path)
        self._collector.start()
        self._outage(began)

    def _unfinished_bodies(self, seconds: float) -> None:
        with self._loud.unfinished_bodies(86):
            time.sleep(seconds)

    def _unread_answers(self, seconds: float) -> None:
        with self._loud.slow_readers(16):
            time.sleep(seconds)

    @property
    def _file(self) -> Path:
        return Path(self._collector.database_url.removeprefix("sqlite:///"))

    def _measure_memory(self) -> None:
        self.record.memory.append((time.monotonic(), self._collector.memory_bytes()))
        self.record.peak_bytes = max(self.record.peak_bytes, self._collector.memory_bytes("VmHWM"))


def lost_and_doubled(database_url: str, tenant: Tenant, batches: int) -> tuple[int, int]:
    """Acknowledged spans that are not stored, and spans that are stored twice."""
    store = Store(database_url)
    key = f"{tenant.run}/{tenant.run}"
    run = store.run(key)
    lost = doubled = 0
    spans_a_batch = LOAD.steps * LOAD.buckets
    for first in range(0, batches, 100):
        last = min(first + 100, batches)
        steps = (first * LOAD.steps, last * LOAD.steps - 1)
        _, spans = store.spans(key, run.attempt, None, *steps) if run else (None, _no_spans())
        distinct = len(np.unique(np.stack([spans.step, spans.bucket]), axis=1).T)
        lost += (last - first) * spans_a_batch - distinct
        doubled += len(spans) - distinct
    store.close()
    return lost, doubled


def _no_spans() -> wire.Spans:
    return wire.Spans.from_table(np.zeros((len(wire.Spans.names), 0), np.int64))


def figures(record: Record, database_url: str, quiet: Tenant) -> dict[str, Any]:
    """The conditions' figures."""
    calm = [
        seconds
        for at, seconds in record.latencies_s
        if not any(begin <= at <= end or begin <= at + seconds <= end for begin, end in record.outages)
    ]
    resident = [size for _, size in record.memory if size]
    middle = len(resident) // 2
    lost, doubled = lost_and_doubled(database_url, quiet, record.acknowledged)
    return {
        "acknowledged_spans": record.acknowledged * LOAD.steps * LOAD.buckets,
        "lost_spans": lost,
        "doubled_spans": doubled,
        "p50_ms": float(np.median(calm or [0.0])) * 1e3,
        "p99_ms": float(np.percentile(calm or [0.0], 99)) * 1e3,
        "peak_mb": record.peak_bytes / 1e6,
        "first_half_mb": max(resident[:middle], default=0) / 1e6,
        "second_half_mb": max(resident[middle:], default=0) / 1e6,
        "faults": record.faults,
    }


def broken_conditions(result: dict[str, Any]) -> list[str]:
    """The conditions that do not hold."""
    checks = {
        f"{result['lost_spans']} acknowledged spans are not stored": result["lost_spans"],
        f"{result['doubled_spans']} spans are stored twice": result["doubled_spans"],
        f"the peak of the memory is {result['peak_mb']:.0f} MB": result["peak_mb"] * 1e6 > MEMORY_BYTES,
        "the memory grows": result["second_half_mb"] > FLAT_RATIO * result["first_half_mb"],
        f"the 99th percentile of the latency is {result['p99_ms']:.0f} ms": result["p99_ms"] > P99_S * 1e3,
    }
    return [text for text, is_broken in checks.items() if is_broken]


def run(folder: Path, url: str, server: Any, seconds: float, seed: int) -> dict[str, Any]:
    """Run the soak, then check the store."""
    secrets = tokens(url, "quiet", "loud")
    collector = Collector(folder, url, dict(_SETTINGS))
    collector.start()
    quiet, loud = (Tenant(collector, secret, name) for secret, name in zip(secrets, ("quiet", "loud"), strict=True))
    soak = Soak(collector, (quiet, loud), server, seed)
    pause_s = min(10.0, seconds / 6)
    deadline = time.monotonic() + seconds
    try:
        with ExitStack() as stack:
            clients = [stack.enter_context(httpx.Client(timeout=40)) for _ in range(3)]
            for work, client in zip((soak.send, soak.watch, soak.attack), clients, strict=True):
                stack.enter_context(Background(lambda number, work=work, client=client: work(client, number)))  # type: ignore[misc]
            while time.monotonic() < deadline:
                time.sleep(pause_s)
                soak.fault(pause_s / 2)
    finally:
        collector.end()
    return figures(soak.record, url, quiet)


def main() -> None:
    """Run, print the figures, and exit with 1 if a condition does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--postgres", action="store_true", help="use a new PostgreSQL server")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    seconds = 12.0 if options.smoke else options.seconds
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(databases.postgresql_server()) if options.postgres else None
        url = databases.new_database(server) if server is not None else databases.sqlite(folder)
        result = run(folder, url, server, seconds, options.seed)
    for name, value in result.items():
        print(f"{name:>20}  {value:,.1f}" if isinstance(value, float) else f"{name:>20}  {value}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if broken := broken_conditions(result):
        sys.exit("; ".join(broken))


if __name__ == "__main__":
    main()
