"""Durable bucket spans a second over HTTP into SQLite, and bytes a span at rest.

    python -m benchmarks.ingest [--rounds 3] [--batches 120] [--clients 8] [--json FILE]

Each round floods a real collector on a fresh file (`ddpobs-server bench`); a batch counts when its acknowledgement is
there, which is after its commit with `synchronous=FULL`. Beside it, in the same round, stands what the disk and SQLite
alone give: rows, one per span, with one such commit a batch, and fsyncs.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import tempfile
import time
from pathlib import Path

from ddpobs_server import bench

from ddpobs import wire

SPANS = bench.FLOOD_STEPS * bench.FLOOD_BUCKETS
"""Spans of a batch: what the exporter sends by default."""


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


def _size_bytes(database: Path) -> int:
    with sqlite3.connect(database) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return database.stat().st_size


def measure(rounds: int, count: int, clients: int) -> dict[str, float]:
    """Medians over interleaved rounds."""
    load = bench.flood(clients, max(1, count // clients))
    batches = [bench.batch(load, rank, seq) for seq in range(load.batches) for rank in range(load.ranks)]
    seen: dict[str, list[float]] = {}
    for number in range(rounds):
        found = bench.measure(load)
        with tempfile.TemporaryDirectory() as name:
            row_rate, row_size = as_rows(Path(name), batches)
            syncs = bench.fsyncs_a_second(Path(name), int(found["bytes_per_span"] * SPANS), len(batches))
        found |= {
            "row_spans_per_s": row_rate,
            "row_bytes_per_span": row_size / load.spans,
            "fsyncs_per_s": syncs,
            "rate_ratio_to_rows": found["spans_per_s"] / row_rate,
            "size_ratio_to_rows": found["bytes_per_span"] / (row_size / load.spans),
            "batches_per_fsync": found["spans_per_s"] / SPANS / syncs,
        }
        rate, ratio = found["spans_per_s"], found["rate_ratio_to_rows"]
        print(f"round {number + 1}: {rate / 1e6:.2f} M spans/s, {ratio:.2f} x rows", flush=True)
        for key, value in found.items():
            seen.setdefault(key, []).append(value)
    return {key: statistics.median(values) for key, values in seen.items()}


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=120)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    m = measure(options.rounds, options.batches, options.clients)
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
    if options.json:
        options.json.write_text(json.dumps(m, indent=2) + "\n")


if __name__ == "__main__":
    main()
