"""Measure what a collector takes for runs far beyond its default limits: 100,000 ranks, a million buckets.

    python -m benchmarks.extremes [--ranks 100000] [--modules 20] [--buckets 50000] [--json FILE] [--smoke]

The limits are raised as far as needed. Each read is timed once, when the collector is idle, in processor seconds of the
process that also sends the requests, with the growth of its peak memory.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from ddpobs_server.app import create_app
from ddpobs_server.settings import Settings
from ddpobs_server.store import Store
from fastapi.testclient import TestClient

from benchmarks.reads import Shape, arrival, batch
from benchmarks.rig import databases
from ddpobs import wire

_STEPS, _GROUP = 4, 64
_RAISED: dict[str, Any] = {
    "max_ranks": 2**20,
    "max_sources": 10**6,
    "max_buckets": 2**20,
    "max_names": 2 * 10**6,
    "max_records": 10**6,
    "max_run_series": 10**7,
    "max_series": 10**8,
    "max_batch_mb": 200,
    "max_body_mb": 200,
}
_READS = {
    "the list of runs": "?limit=50",
    "the run": "/run",
    "its ranks": "/run/ranks",
    "its diagnosis": "/run/diagnostics",
    "the layout": "/run/layout",
    "the buckets": "/run/buckets",
    "late ranks by step": "/run/stragglers",
    "a page of steps": "/run/steps",
    "steps in 500 points": "/run/steps?points=500",
    "a page of spans": "/run/spans",
    "a step's trace": "/run/trace?from=0&to=0",
    "the report": "/run/report.html",
    "a comparison": "/run/compare?with=run",
}


def memory_mb(name: str) -> float:
    """`VmRSS`, the resident memory of this process, or `VmHWM`, its peak."""
    match = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(match[1]) / 1e3 if match else 0.0


@contextmanager
def collector() -> Iterator[tuple[TestClient, Store]]:
    """A collector in this process with raised limits, and another store on its database."""
    with tempfile.TemporaryDirectory() as folder:
        url = databases.sqlite(Path(folder))
        with TestClient(create_app(Settings(database_url=url, **_RAISED)), raise_server_exceptions=False) as http:
            store = Store(url)
            yield http, store
            store.close()


def fill_ranks(store: Store, ranks: int) -> None:
    """Write a run of that many ranks, with a batch each."""
    plain = batch(Shape("run", ranks, _STEPS, 2, _STEPS), 0, 0)
    group = []
    for rank in range(ranks):
        layouts = plain.layouts if rank == 0 else []
        sent = msgspec.structs.replace(plain, rank=rank, source=f"{rank:016x}", layouts=layouts)
        group.append(arrival(sent))
        if len(group) == _GROUP or rank == ranks - 1:
            store.ingest(group)
            group = []


def send_buckets(http: TestClient, modules: int, buckets: int) -> None:
    """Send a run of two ranks whose DDP modules have that many buckets each."""
    plain, number = batch(Shape("run", 2, 40, 2, 40), 0, 0), np.arange(buckets)
    zeros = number * 0
    for rank in range(2):
        for module in range(modules):
            layout = [
                wire.Bucket(
                    size_bytes=4, dtype="f", parameters=[wire.Parameter(name=f"layer.{module}.{index}", size=1)]
                )
                for index in range(buckets)
            ]
            times = {f"{name}_ns": number + delay for name, delay in (("ready", 0), ("launched", 0), ("done", 5))}
            step = zeros + (39 + module if module else 0)  # A process sends its steps in order.
            unknown = zeros + wire.UNKNOWN
            columns = {"step": step, "module": zeros + module, "revision": zeros, "bucket": number, **times}
            sent = msgspec.structs.replace(
                plain,
                rank=rank,
                source=f"{rank:016x}",
                seq=module,
                spans=wire.Spans(**columns, started_ns=unknown, waited_ns=unknown),
                layouts=[wire.Layout(module=module, name="m", revision=0, comm="c", buckets=layout)],
                steps=plain.steps if module == 0 else None,
            )
            path = f"/api/v1/runs/run/sources/{sent.source}/batches/{module}"
            headers = {"Content-Type": wire.MSGPACK}
            answer = http.put(path, content=wire.encode(sent), headers=headers)
            assert answer.is_success, answer.text


def wait_until_idle(limit_s: float = 300) -> None:
    """Wait until the collector is idle: background work would count as the next read's."""
    ends = time.monotonic() + limit_s
    while time.monotonic() < ends:
        used = time.process_time()
        time.sleep(0.2)
        if time.process_time() - used < 0.02:
            return
    print(f"the collector still works after {limit_s:.0f} s: the next read's time includes that", flush=True)


def measure(http: TestClient) -> dict[str, dict[str, float]]:
    """Status, MB of the response, processor seconds and growth of the peak memory of each read."""
    found = {}
    for title, path in {"`/metrics`": "", **_READS}.items():
        wait_until_idle()
        Path("/proc/self/clear_refs").write_text("5")
        before_mb, began = memory_mb("VmRSS"), time.process_time()
        answer = http.get(f"/api/v1/runs{path}" if path else "/metrics?only=runs")
        found[title] = {
            "status": answer.status_code,
            "mb": len(answer.content) / 1e6,
            "processor_s": time.process_time() - began,
            "peak_mb": memory_mb("VmHWM") - before_mb,
        }
        print(title, found[title], flush=True)
    return found


def main() -> None:
    """Measure both runs and print a row for each read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=100_000)
    parser.add_argument("--modules", type=int, default=20)
    parser.add_argument("--buckets", type=int, default=50_000, help="buckets of each module")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    if options.smoke:
        options.ranks, options.modules, options.buckets = 20, 2, 10
    with collector() as (http, store):
        fill_ranks(store, options.ranks)
        by_ranks = measure(http)
    with collector() as (http, _):
        send_buckets(http, options.modules, options.buckets)
        by_buckets = measure(http)
    results = {"ranks": options.ranks, "by_ranks": by_ranks}
    results |= {"buckets": options.modules * options.buckets, "by_buckets": by_buckets}
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
