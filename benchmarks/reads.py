"""Measure a collector's answers about large runs, over HTTP, against their bounds.

    python -m benchmarks.reads [--times 30] [--postgres | --database-url URL] [--json FILE] [--smoke]

Two runs are written through the store as ranks send them. Then a real collector answers requests. *large* has ten
million spans: 64 ranks, 40 buckets, batches of 5,000. *wide* has 1,024 ranks and 2,000 steps, in batches of 20 seconds.
One rank of each is slow in backward, so that a diagnosis takes all its branches. A pulse arrives before each first
request, so that no cached answer is used. For comparison, each round also times the database alone: it reads all
columns of the large run once, without decoding.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import numpy as np
from ddpobs_server.operations.make_bins import update_step_bins
from ddpobs_server.reports.read_bins import AttemptBins
from ddpobs_server.store import Arrival, Store
from sqlalchemy import Engine, create_engine, text

from benchmarks import capacity, loads
from benchmarks.rig import databases
from ddpobs import wire

BARE = "large: the database reads all columns"
_GROUP = 64
_MS = 1_000_000
_SLOW_NS = 25 * _MS
_FIRST_LATE_BUCKET = 10


@dataclass(frozen=True)
class Shape:
    """A run: its size, and the number of a rank's steps in a batch."""

    name: str
    ranks: int
    steps: int
    buckets: int
    steps_a_batch: int

    @property
    def load(self) -> loads.Load:
        """The same run as a load of `benchmarks.capacity`."""
        return loads.Load(self.ranks, self.steps // self.steps_a_batch, self.steps_a_batch, self.buckets, 0.0, 1)


LARGE = Shape("large", 64, 3_906, 40, 126)
WIDE = Shape("wide", 1_024, 2_000, 40, 40)
SMALL = {"large": Shape("large", 8, 160, 4, 40), "wide": Shape("wide", 16, 64, 4, 4)}


def batch(shape: Shape, rank: int, seq: int) -> wire.Batch:
    """Return a batch of `benchmarks.capacity` under this run's name. The last rank is late from one bucket on."""
    plain = loads.batch(shape.load, rank, seq)
    changes: dict[str, object] = {}
    if seq == 0:
        size = wire.Parameter(name="weight", size=250_000)
        buckets = [wire.Bucket(size_bytes=1_000_000, dtype="float32", parameters=[size])] * shape.buckets
        changes["hello"] = wire.Hello(host=f"node{rank // 8}", pid=rank, device="cuda", backend="nccl", versions={})
        changes["layouts"] = [wire.Layout(module=0, name="model", revision=0, comm="allreduce", buckets=buckets)]
    if rank == shape.ranks - 1 and plain.steps is not None and plain.spans is not None:
        late = np.where(plain.spans.bucket >= min(_FIRST_LATE_BUCKET, shape.buckets - 1), _SLOW_NS, 0)
        times = {f"{name}_ns": getattr(plain.spans, f"{name}_ns") + late for name in ("ready", "launched", "done")}
        names = ("backward_ns", "own_ns", "own_backward_ns", "end_ns")
        longer = {name: getattr(plain.steps, name) + _SLOW_NS for name in names}
        changes["spans"] = wire.Spans(**plain.spans.by_name() | times)
        changes["steps"] = wire.Steps(**plain.steps.by_name() | longer)
    return msgspec.structs.replace(plain, run=shape.name, **changes)


def arrival(batch: wire.Batch) -> Arrival:
    """Return the batch as ingest passes it to the store; its digest replaces the body's."""
    packed = batch if batch.spans is None else msgspec.structs.replace(batch, packed_spans=wire.pack_spans(batch.spans))
    digest = hashlib.sha256(f"{batch.run} {batch.source} {batch.seq}".encode()).digest()
    return Arrival(packed, digest, len(packed.packed_spans or b""), time.time_ns())


def fill(store: Store, shape: Shape) -> None:
    """Write a run, with all ranks at the same pace."""
    load = shape.load
    keys = ((rank, seq) for seq in range(load.batches) for rank in range(load.ranks))
    while group := list(itertools.islice(keys, _GROUP)):
        store.ingest([arrival(batch(shape, rank, seq)) for rank, seq in group])
    sum(store.compact(0))  # As a collector does meanwhile.
    run = store.run(shape.name)
    assert run is not None
    sum(update_step_bins(AttemptBins(store, shape.name, run.attempt), 2 * time.time_ns()))


@dataclass(frozen=True)
class Request:
    """A read, its bound if it has one, and whether a pulse arrives before it."""

    path: str
    run: str
    bound_ms: float | None = None
    anew: bool = False


def requests(large: Shape, wide: Shape) -> dict[str, Request]:
    """Return the requests by title."""
    number = large.steps // 2
    middle_step = f"from={number}&to={number}"
    wide_step = f"from={wide.steps // 2}&to={wide.steps // 2}"
    api = "/api/v1/runs"
    return {
        "large: diagnostics, first request": Request(f"{api}/large/diagnostics", "large", 300, anew=True),
        "large: diagnostics, again": Request(f"{api}/large/diagnostics", "large", 300),
        "large: a step's spans": Request(f"{api}/large/spans?{middle_step}", "large", 50),
        "large: a step's trace": Request(f"{api}/large/trace?{middle_step}", "large", 50),
        "large: a step of one rank": Request(f"{api}/large/steps?{middle_step}&rank=3", "large", 50),
        "large: stragglers": Request(f"{api}/large/stragglers", "large"),
        "large: 500 steps, the mean over ranks": Request(f"{api}/large/steps?from=0&to=499&mean=true", "large"),
        "large: a page of all spans": Request(f"{api}/large/spans", "large"),
        "wide: diagnostics, first request": Request(f"{api}/wide/diagnostics", "wide", anew=True),
        "wide: a step's spans": Request(f"{api}/wide/spans?{wide_step}", "wide"),
        "wide: stragglers": Request(f"{api}/wide/stragglers", "wide"),
        "both: /metrics": Request("/metrics", "wide", 100, anew=True),
        "both: the list of runs": Request(f"{api}?limit=50", "wide"),
    }


def processor_s(pid: int) -> float:
    """Return the processor time of a process's threads so far."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def columns_read(engine: Engine) -> float:
    """Return the seconds to read every stored column of the large run."""
    with engine.connect() as connection:
        began = time.perf_counter()
        connection.execute(text("select sum(length(payload)) from chunks where run_id = 'large'")).one()
        return time.perf_counter() - began


def measure(
    database_url: str, folder: Path, shapes: dict[str, Shape], times: int
) -> dict[str, dict[str, float | None]]:
    """Return each read's median, 99th percentile, the collector's processor time, bytes, and the ratio to `BARE`."""
    by_title = requests(*shapes.values())
    seconds_by_title: dict[str, list[float]] = {name: [] for name in (*by_title, BARE)}
    sizes: dict[str, int] = {}
    processor_by_title = dict.fromkeys(by_title, 0.0)
    engine = create_engine(database_url)
    with (
        capacity.collector(folder, database_url) as (process, address),
        httpx.Client(base_url=address, timeout=300) as client,
    ):
        for request in by_title.values():
            client.get(request.path).raise_for_status()
        for _ in range(times):
            seconds_by_title[BARE].append(columns_read(engine))
            for name, request in by_title.items():
                if request.anew:
                    pulse_batch = msgspec.structs.replace(
                        batch(shapes[request.run], 0, 1), seq=time.time_ns() // _MS, steps=None, spans=None
                    )
                    path = f"/api/v1/runs/{pulse_batch.run}/sources/{pulse_batch.source}/batches/{pulse_batch.seq}"
                    response = client.put(
                        path, content=wire.encode(pulse_batch), headers={"Content-Type": wire.MSGPACK}
                    )
                    response.raise_for_status()
                processor_before_s, began = processor_s(process.pid), time.perf_counter()
                answer = client.get(request.path).raise_for_status()
                seconds_by_title[name].append(time.perf_counter() - began)
                processor_by_title[name] += processor_s(process.pid) - processor_before_s
                sizes[name] = len(answer.content)
    engine.dispose()
    bare = statistics.median(seconds_by_title[BARE])
    return {
        name: {
            "median_ms": statistics.median(seconds) * 1e3,
            "p99_ms": float(np.percentile(seconds, 99)) * 1e3,
            "processor_ms": processor_by_title[name] / times * 1e3 if name in processor_by_title else None,
            "bound_ms": by_title[name].bound_ms if name in by_title else None,
            "bytes": sizes.get(name),
            "ratio_to_bare": statistics.median(seconds) / bare,
        }
        for name, seconds in seconds_by_title.items()
    }


def main() -> None:
    """Write the runs, measure, and print a row for each read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=30, help="repetitions of each request")
    parser.add_argument("--postgres", action="store_true", help="use a new PostgreSQL server")
    parser.add_argument("--database-url", help="use this database; missing runs are written to it")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    shapes, times = (SMALL, 2) if options.smoke else ({"large": LARGE, "wide": WIDE}, options.times)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if options.postgres:
            url = stack.enter_context(databases.postgresql())(folder)
        else:
            url = options.database_url or databases.sqlite(folder)
        store = Store(url)
        store.migrate()
        for name, shape in shapes.items():
            if store.run(name) is None:
                began = time.perf_counter()
                fill(store, shape)
                spans = shape.load.spans
                print(f"{name}: {spans:,} spans written in {time.perf_counter() - began:.0f} s", flush=True)
        store.close()
        results = measure(url, folder, shapes, times)
    print(
        f"\n| read, {times} times | median, ms | p99, ms | bound, ms | processor, ms "
        "| of reading all columns | answer, kB |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, row in results.items():
        bound = f"{row['bound_ms']:.0f}" if row["bound_ms"] else ""
        size = f"{row['bytes'] / 1e3:,.0f}" if row["bytes"] else ""
        processor = f"{row['processor_ms']:.1f}" if row["processor_ms"] is not None else ""
        print(
            f"| {name} | {row['median_ms']:.1f} | {row['p99_ms']:.1f} | {bound} | {processor} "
            f"| {row['ratio_to_bare']:.2f} | {size} |"
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
