"""Measure a collector's /metrics over HTTP: one run of many ranks, and many runs of few ranks.

    python -m benchmarks.scrapes [--times 15] [--json FILE] [--smoke]

*wide* is one run of 1,024 ranks, *many* are 1,000 runs of 4 ranks; both have 40 buckets and are active. Before each
scrape either one rank sends a pulse, or every run, or none. An unchanged run is not read or rendered again. The bound
of *wide* is on the collector's processor time, that of *many* on the wall time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import httpx
import msgspec
from ddpobs_server.store import Store

from benchmarks import capacity
from benchmarks.reads import Shape, arrival, batch, processor_s
from benchmarks.rig import databases
from ddpobs import wire

_GROUP = 64
WIDE = Shape("wide", 1_024, 40, 40, 40)
MANY = Shape("many", 4, 40, 40, 40)
BOUNDS_MS = {"wide: one rank sent": 60, "many: every run sent": 1000}
"""Processor time in the first case, wall time in the second."""


def fill(store: Store, shape: Shape, runs: int) -> None:
    """Write the runs of this shape, each with all ranks."""
    arrivals = [
        arrival(msgspec.structs.replace(batch(shape, rank, 0), run=f"{shape.name}-{run}"))
        for run in range(runs)
        for rank in range(shape.ranks)
    ]
    for first in range(0, len(arrivals), _GROUP):
        store.ingest(arrivals[first : first + _GROUP])


def pulse(shape: Shape, run: int, seq: int) -> wire.Batch:
    """Return a batch without steps, as a rank sends every two seconds."""
    plain = msgspec.structs.replace(batch(shape, 0, 1), steps=None, spans=None)
    return msgspec.structs.replace(plain, run=f"{shape.name}-{run}", seq=seq)


class Scraper:
    """Sends pulses and scrapes a collector."""

    def __init__(self, client: httpx.Client, pid: int) -> None:
        self._client, self._pid, self._seq = client, pid, 10

    def send(self, shape: Shape, runs: int) -> None:
        """Send a pulse to each of the first runs."""
        self._seq += 1
        for run in range(runs):
            payload = pulse(shape, run, self._seq)
            path = f"/api/v1/runs/{payload.run}/sources/{payload.source}/batches/{payload.seq}"
            headers = {"Content-Type": wire.MSGPACK}
            self._client.put(path, content=wire.encode(payload), headers=headers).raise_for_status()

    def scrape(self, encoding: str) -> tuple[float, float, int]:
        """Return the seconds, the collector's processor seconds, and the bytes sent."""
        processor_before_s, began = processor_s(self._pid), time.perf_counter()
        with self._client.stream("GET", "/metrics?only=runs", headers={"Accept-Encoding": encoding}) as answer:
            size = sum(map(len, answer.raise_for_status().iter_raw()))
        return time.perf_counter() - began, processor_s(self._pid) - processor_before_s, size


def measure(shape: Shape, runs: int, times: int) -> dict[str, dict[str, float]]:
    """Return the medians of each case for runs of this shape."""
    cases = {"no rank sent": 0, "one rank sent": 1} | ({"every run sent": runs} if runs > 1 else {})
    results = {}
    with tempfile.TemporaryDirectory() as name:
        url = databases.sqlite(Path(name))
        store = Store(url)
        store.migrate()
        fill(store, shape, runs)
        store.close()
        with (
            capacity.collector(Path(name), url) as (process, address),
            httpx.Client(base_url=address, timeout=300) as client,
        ):
            scraper = Scraper(client, process.pid)
            for _ in range(3):
                scraper.scrape("identity")
            for case, sending in cases.items():
                for encoding in ("identity", "gzip"):
                    rows = []
                    for _ in range(times):
                        scraper.send(shape, sending)
                        time.sleep(0.3)  # A diagnosis that the pulse caused is not the scrape's work.
                        rows.append(scraper.scrape(encoding))
                    seconds, processor, sizes = zip(*rows, strict=True)
                    title = f"{shape.name}: {case}" + (", gzip" if encoding == "gzip" else "")
                    results[title] = {
                        "median_ms": statistics.median(seconds) * 1e3,
                        "processor_ms": statistics.median(processor) * 1e3,
                        "bytes": float(sizes[-1]),
                    }
    return results


def main() -> None:
    """Measure both shapes and print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=15, help="scrapes of each case")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    sizes = (
        ((Shape("wide", 8, 40, 4, 40), 1), (Shape("many", 2, 40, 4, 40), 5))
        if options.smoke
        else ((WIDE, 1), (MANY, 1000))
    )
    times = 2 if options.smoke else options.times
    results: dict[str, dict[str, float]] = {}
    for shape, runs in sizes:
        results |= measure(shape, runs, times)
    print(f"\n| scrape, {times} times | median, ms | processor, ms | bound, ms | answer, kB |\n|---|---|---|---|---|")
    for title, row in results.items():
        bound = BOUNDS_MS.get(title, "")
        print(f"| {title} | {row['median_ms']:.1f} | {row['processor_ms']:.1f} | {bound} | {row['bytes'] / 1e3:,.0f} |")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
