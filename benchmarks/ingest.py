"""Durable bucket spans a second over HTTP into SQLite, and bytes a span at rest.

    python -m benchmarks.ingest [--rounds 3] [--batches 120] [--clients 4] [--json FILE]

Each round starts a real `ddpobs-server` on a fresh file, sends it the same batches from some clients, and counts a
batch when its acknowledgement is there, which is after its commit with `synchronous=FULL`. Beside it, in the same round
and folder, stands what the disk and SQLite alone give: rows, one per span, with one such commit a batch, and fsyncs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import zstandard

from ddpobs import wire

STEPS, BUCKETS = 250, 20
SPANS = STEPS * BUCKETS
"""Spans of a batch: what the exporter sends by default."""


def batch(seq: int) -> wire.Batch:
    """250 steps of 20 buckets, with the jitter of real times: each readiness and each reduction varies by itself."""
    random = np.random.default_rng(seq)
    step = np.arange(seq * STEPS, (seq + 1) * STEPS)
    compute = random.gamma(20.0, 150_000.0, (STEPS, BUCKETS)).astype(np.int64)
    comm = random.gamma(4.0, 500_000.0, (STEPS, BUCKETS)).astype(np.int64)
    start = step * 200_000_000 + random.integers(0, 1_000_000, STEPS)
    ready = start[:, None] + 30_000_000 + compute.cumsum(axis=1)
    launched = ready + random.integers(5_000, 60_000, ready.shape)
    zeros = np.zeros(SPANS, np.int64)
    return wire.Batch(
        version=wire.VERSION,
        run="benchmark",
        attempt="a" * 16,
        source=f"{seq % 4:016x}",
        seq=seq,
        rank=seq % 4,
        world_size=4,
        emitted=SPANS * (seq + 1),
        dropped=0,
        anchor=wire.Anchor(wall_ns=time.time_ns(), monotonic_ns=time.monotonic_ns()),
        steps=_steps(step, start, ready[:, -1] - start, random),
        spans=wire.Spans(
            step=np.repeat(step, BUCKETS),
            module=zeros,
            revision=zeros,
            bucket=np.tile(np.arange(BUCKETS), STEPS),
            ready_ns=ready.reshape(-1),
            launched_ns=launched.reshape(-1),
            started_ns=zeros + wire.UNKNOWN,
            done_ns=(launched + comm).reshape(-1),
        ),
    )


def _steps(step: wire.Ints, start: wire.Ints, backward: wire.Ints, random: np.random.Generator) -> wire.Steps:
    phases = {f"{phase}_ns": random.integers(1_000_000, 20_000_000, len(step)) for phase in wire.PHASES}
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


def over_http(folder: Path, bodies: list[tuple[wire.Batch, bytes]], clients: int) -> tuple[float, int]:
    """Acknowledged spans a second, and bytes of the database once the collector has ended."""
    database, log = folder / "runs.db", folder / "log"
    command = [str(Path(sys.executable).with_name("ddpobs-server")), "--port", "0"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--database-url", f"sqlite:///{database}"], stdout=out, stderr=out, cwd=folder
        )
    try:
        url = _address(process, log)
        with httpx.Client(base_url=url, timeout=60) as client, ThreadPoolExecutor(clients) as pool:
            client.get("/readyz").raise_for_status()
            began = time.perf_counter()
            for answer in pool.map(lambda one: _put(client, *one), bodies):
                if answer != 201:
                    raise RuntimeError(f"a batch was answered {answer}")
            took = time.perf_counter() - began
    finally:
        process.terminate()
        process.wait(30)
    return len(bodies) * SPANS / took, _size_bytes(database)


def _put(client: httpx.Client, sent: wire.Batch, body: bytes) -> int:
    path = f"/api/v1/runs/{sent.run}/sources/{sent.source}/batches/{sent.seq}"
    headers = {"Content-Type": wire.MSGPACK, "Content-Encoding": "zstd"}
    return client.put(path, content=body, headers=headers).status_code


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"running on (http://[^ ]+)", log.read_text()):
            return found[1]
        time.sleep(0.05)
    raise RuntimeError(f"no collector: {log.read_text()}")


def _size_bytes(database: Path) -> int:
    with sqlite3.connect(database) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return database.stat().st_size


def as_rows(folder: Path, batches: list[wire.Batch]) -> tuple[float, int]:
    """The same spans as one row each with SQLite alone: no HTTP, no checks, one durable commit a batch."""
    database = folder / "rows.db"
    connection = sqlite3.connect(database, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    names = wire.Spans.__struct_fields__
    keys = "run_id, source, module, revision, step, bucket"
    connection.execute(
        f"create table spans (run_id text, source text, {', '.join(f'{name} integer' for name in names)}, "
        f"primary key ({keys})) without rowid"
    )
    insert = f"insert into spans values ({', '.join('?' * (len(names) + 2))})"
    began = time.perf_counter()
    for one in batches:
        columns = [getattr(one.spans, name).tolist() for name in names]
        connection.execute("BEGIN")
        connection.executemany(insert, ((one.run, one.source, *row) for row in zip(*columns, strict=True)))
        connection.execute("COMMIT")
    took = time.perf_counter() - began
    connection.close()
    return len(batches) * SPANS / took, _size_bytes(database)


def fsyncs_a_second(folder: Path, size_bytes: int, count: int) -> float:
    """Appends of `size_bytes`, each followed by an fsync."""
    block = os.urandom(size_bytes)
    with (folder / "bare").open("wb", buffering=0) as out:
        began = time.perf_counter()
        for _ in range(count):
            out.write(block)
            os.fsync(out.fileno())
        return count / (time.perf_counter() - began)


def measure(rounds: int, count: int, clients: int, folder: str | None) -> dict[str, float]:
    """Medians over interleaved rounds."""
    batches = [batch(seq) for seq in range(count)]
    bodies = [(one, zstandard.compress(wire.encode(one))) for one in batches]
    body_bytes = statistics.mean(len(body) for _, body in bodies)
    seen: dict[str, list[float]] = {}
    for number in range(rounds):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            rate, size = over_http(Path(name), bodies, clients)
            row_rate, row_size = as_rows(Path(name), batches)
            syncs = fsyncs_a_second(Path(name), int(body_bytes), count)
        found = {
            "spans_per_s": rate,
            "bytes_per_span": size / (count * SPANS),
            "row_spans_per_s": row_rate,
            "row_bytes_per_span": row_size / (count * SPANS),
            "fsyncs_per_s": syncs,
            "rate_ratio_to_rows": rate / row_rate,
            "size_ratio_to_rows": size / row_size,
            "batches_per_fsync": rate / SPANS / syncs,
        }
        print(f"round {number + 1}: {rate / 1e6:.2f} M spans/s, {found['rate_ratio_to_rows']:.2f} x rows", flush=True)
        for key, value in found.items():
            seen.setdefault(key, []).append(value)
    return {key: statistics.median(values) for key, values in seen.items()} | {
        "wire_bytes_per_span": body_bytes / SPANS
    }


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=120)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--folder", help="Where the databases go; decides which disk is measured.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    m = measure(options.rounds, options.batches, options.clients, options.folder)
    print(
        f"\n{options.batches} batches of {SPANS} spans, {options.clients} clients, medians of {options.rounds} rounds"
    )
    print(
        f"  over HTTP, acknowledged after commit  {m['spans_per_s']:12,.0f} spans/s  {m['bytes_per_span']:6.1f} B/span"
    )
    print(f"  a row a span, SQLite alone            {m['row_spans_per_s']:12,.0f} spans/s  "
          f"{m['row_bytes_per_span']:6.1f} B/span")  # fmt: skip
    print(f"  ratio                                 {m['rate_ratio_to_rows']:12.2f} x        "
          f"{m['size_ratio_to_rows']:6.3f} x")  # fmt: skip
    print(f"  bare fsyncs of a batch's size         {m['fsyncs_per_s']:12,.0f} /s       "
          f"{m['batches_per_fsync']:6.2f} batches stored in the time of one")  # fmt: skip
    print(f"  on the wire                           {m['wire_bytes_per_span']:12.1f} B/span")
    if options.json:
        options.json.write_text(json.dumps(m, indent=2) + "\n")


if __name__ == "__main__":
    main()
