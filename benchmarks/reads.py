"""How long a collector takes to answer about large runs, over HTTP, beside the bounds it is held to.

    python -m benchmarks.reads [--times 30] [--postgres | --database-url URL] [--json FILE] [--smoke]

Two runs are written through the store as ranks send them, and then a real collector is asked. *large* has ten million
spans: 64 ranks, 40 buckets, batches of 5,000. *wide* has 1,024 ranks and 2,000 steps, in batches of 20 seconds. One
rank of each is slow in backward, so that a diagnosis goes all its ways. Before each first ask a pulse arrives, so that
nothing that was kept answers. Beside them, in each round, stands how long the database alone takes to read all columns
of the large run once, with no decoding.
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
from ddpobs_server.operations import bench
from ddpobs_server.store import Arrival, Store
from sqlalchemy import Engine, create_engine, text

from ddpobs import wire
from tests import databases

BARE = "large: the database reads all columns"
_GROUP = 64
_MS = 1_000_000
_SLOW_NS = 25 * _MS
_FIRST_LATE_BUCKET = 10


@dataclass(frozen=True)
class Shape:
    """A run: what its ranks send, and how many steps of a rank are in a batch."""

    name: str
    ranks: int
    steps: int
    buckets: int
    steps_a_batch: int

    @property
    def load(self) -> bench.Load:
        """As `ddpobs-server bench` would send it."""
        return bench.Load(self.ranks, self.steps // self.steps_a_batch, self.steps_a_batch, self.buckets, 0.0, 1)


LARGE = Shape("large", 64, 3_906, 40, 126)
WIDE = Shape("wide", 1_024, 2_000, 40, 40)
SMALL = {"large": Shape("large", 8, 160, 4, 40), "wide": Shape("wide", 16, 64, 4, 4)}


def batch(shape: Shape, rank: int, seq: int) -> wire.Batch:
    """What `ddpobs-server bench` sends, under this run's name; the last rank is late from one bucket on."""
    made = bench.batch(shape.load, rank, seq)
    first: dict[str, object] = {}
    if seq == 0:
        size = wire.Parameter(name="weight", size=250_000)
        buckets = [wire.Bucket(size_bytes=1_000_000, dtype="float32", parameters=[size])] * shape.buckets
        first["hello"] = wire.Hello(host=f"node{rank // 8}", pid=rank, device="cuda", backend="nccl", versions={})
        first["layouts"] = [wire.Layout(module=0, name="model", revision=0, comm="allreduce", buckets=buckets)]
    if rank == shape.ranks - 1 and made.steps is not None and made.spans is not None:
        late = np.where(made.spans.bucket >= min(_FIRST_LATE_BUCKET, shape.buckets - 1), _SLOW_NS, 0)
        times = {f"{name}_ns": getattr(made.spans, f"{name}_ns") + late for name in ("ready", "launched", "done")}
        names = ("backward_ns", "own_ns", "own_backward_ns", "end_ns")
        longer = {name: getattr(made.steps, name) + _SLOW_NS for name in names}
        first["spans"] = wire.Spans(**made.spans.by_name() | times)
        first["steps"] = wire.Steps(**made.steps.by_name() | longer)
    return msgspec.structs.replace(made, run=shape.name, **first)


def arrival(one: wire.Batch) -> Arrival:
    """The batch as ingest hands it on; its digest stands for the body's."""
    packed = one if one.spans is None else msgspec.structs.replace(one, packed_spans=wire.pack_spans(one.spans))
    digest = hashlib.sha256(f"{one.run} {one.source} {one.seq}".encode()).digest()
    return Arrival(packed, digest, len(packed.packed_spans or b""), time.time_ns())


def fill(store: Store, shape: Shape) -> None:
    """Write a run, all ranks going forward together."""
    load = shape.load
    keys = ((rank, seq) for seq in range(load.batches) for rank in range(load.ranks))
    while group := list(itertools.islice(keys, _GROUP)):
        store.ingest([arrival(batch(shape, rank, seq)) for rank, seq in group])
    sum(store.compact(0))  # A collector would do so meanwhile.


@dataclass(frozen=True)
class Ask:
    """A read, its bound if it has one, and whether a pulse arrives before it."""

    path: str
    run: str
    bound_ms: float | None = None
    anew: bool = False


def asks(large: Shape, wide: Shape) -> dict[str, Ask]:
    """What is asked, by title."""
    step = large.steps // 2
    one = f"from={step}&to={step}"
    other = f"from={wide.steps // 2}&to={wide.steps // 2}"
    api = "/api/v1/runs"
    return {
        "large: diagnostics, first ask": Ask(f"{api}/large/diagnostics", "large", 300, anew=True),
        "large: diagnostics, again": Ask(f"{api}/large/diagnostics", "large", 300),
        "large: a step's spans": Ask(f"{api}/large/spans?{one}", "large", 50),
        "large: a step's trace": Ask(f"{api}/large/trace?{one}", "large", 50),
        "large: a step of one rank": Ask(f"{api}/large/steps?{one}&rank=3", "large", 50),
        "large: stragglers": Ask(f"{api}/large/stragglers", "large"),
        "large: 500 steps, the mean over ranks": Ask(f"{api}/large/steps?from=0&to=499&mean=true", "large"),
        "large: a page of all spans": Ask(f"{api}/large/spans", "large"),
        "wide: diagnostics, first ask": Ask(f"{api}/wide/diagnostics", "wide", anew=True),
        "wide: a step's spans": Ask(f"{api}/wide/spans?{other}", "wide"),
        "wide: stragglers": Ask(f"{api}/wide/stragglers", "wide"),
        "both: /metrics": Ask("/metrics", "wide", 100, anew=True),
        "both: the list of runs": Ask(f"{api}?limit=50", "wide"),
    }


def processor_s(pid: int) -> float:
    """Processor time of a process's threads so far."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def columns_read(engine: Engine) -> float:
    """Seconds to read every column of the large run as it is kept."""
    with engine.connect() as connection:
        began = time.perf_counter()
        connection.execute(text("select sum(length(payload)) from chunks where run_id = 'large'")).one()
        return time.perf_counter() - began


def measure(
    database_url: str, folder: Path, shapes: dict[str, Shape], times: int
) -> dict[str, dict[str, float | None]]:
    """Of each read: median, 99th percentile, the collector's processor time, bytes, and the ratio to `BARE`."""
    wanted = asks(*shapes.values())
    took: dict[str, list[float]] = {name: [] for name in (*wanted, BARE)}
    sizes: dict[str, int] = {}
    used = dict.fromkeys(wanted, 0.0)
    engine = create_engine(database_url)
    with (
        bench.collector(folder, database_url) as (process, address),
        httpx.Client(base_url=address, timeout=300) as client,
    ):
        for ask in wanted.values():
            client.get(ask.path).raise_for_status()
        for _ in range(times):
            took[BARE].append(columns_read(engine))
            for name, ask in wanted.items():
                if ask.anew:
                    more = msgspec.structs.replace(
                        batch(shapes[ask.run], 0, 1), seq=time.time_ns() // _MS, steps=None, spans=None
                    )
                    where = f"/api/v1/runs/{more.run}/sources/{more.source}/batches/{more.seq}"
                    put = client.put(where, content=wire.encode(more), headers={"Content-Type": wire.MSGPACK})
                    put.raise_for_status()
                before, began = processor_s(process.pid), time.perf_counter()
                answer = client.get(ask.path).raise_for_status()
                took[name].append(time.perf_counter() - began)
                used[name] += processor_s(process.pid) - before
                sizes[name] = len(answer.content)
    engine.dispose()
    bare = statistics.median(took[BARE])
    return {
        name: {
            "median_ms": statistics.median(seconds) * 1e3,
            "p99_ms": float(np.percentile(seconds, 99)) * 1e3,
            "processor_ms": used[name] / times * 1e3 if name in used else None,
            "bound_ms": wanted[name].bound_ms if name in wanted else None,
            "bytes": sizes.get(name),
            "ratio_to_bare": statistics.median(seconds) / bare,
        }
        for name, seconds in took.items()
    }


def main() -> None:
    """Fill, ask, and print a row for each read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=30, help="how often each is asked")
    parser.add_argument("--postgres", action="store_true", help="in a PostgreSQL server of its own")
    parser.add_argument("--database-url", help="in this database, which is filled where it has no such runs")
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
        found = measure(url, folder, shapes, times)
    print(
        f"\n| read, {times} times | median, ms | p99, ms | bound, ms | processor, ms "
        "| of reading all columns | answer, kB |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, one in found.items():
        bound = f"{one['bound_ms']:.0f}" if one["bound_ms"] else ""
        size = f"{one['bytes'] / 1e3:,.0f}" if one["bytes"] else ""
        processor = f"{one['processor_ms']:.1f}" if one["processor_ms"] is not None else ""
        print(
            f"| {name} | {one['median_ms']:.1f} | {one['p99_ms']:.1f} | {bound} | {processor} "
            f"| {one['ratio_to_bare']:.2f} | {size} |"
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
