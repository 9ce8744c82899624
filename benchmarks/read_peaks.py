"""Measure the memory that a collector takes for its answers about the largest runs, over HTTP, each in a fresh process.

    python -m benchmarks.read_peaks [--runs NAME ...] [--database-url URL] [--json FILE] [--smoke]

Runs are written through the store as ranks send them. *wide* has 1,024 ranks and 2,000 steps. *buckets* has 1,024 ranks
with 1,000 buckets each: a million sums of buckets. *many* has 16,384 ranks, as many as a run may have. *long* has
50,000 steps of 16 ranks. For each route of a run, and its costly variants, a collector starts, answers once, and ends.
The peak is the growth of its resident memory from before the request.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
from ddpobs_server.store import Store

from benchmarks import capacity, reads
from benchmarks.reads import Shape
from benchmarks.rig import databases

SHAPES = (
    Shape("wide", 1_024, 2_000, 4, 200),
    Shape("buckets", 1_024, 8, 1_000, 4),
    Shape("many", 16_384, 16, 2, 16),
    Shape("long", 16, 50_000, 2, 2_500),
)
SMALL = (Shape("wide", 16, 64, 4, 16), Shape("buckets", 4, 8, 50, 4))
_FIGURES = ("account", "buckets", "overview", "phases", "ranks", "step")
_VARIANTS = (
    "/steps?mean=true",
    "/steps?points=10000",
    "/steps?points=10000&mean=true",
    "/steps?rank=0",
    "/spans?rank=0",
    "/spans?from={middle}&to={middle}",
    "/trace?from={middle}&to={middle}",
    "/steps?from={middle}&to={middle}",
    "/diagnostics?from=0&to={middle}",
    "/compare?with={other}",
)


def requests(routes: list[str], shape: Shape, other: str) -> Iterator[str]:
    """Yield the paths of all reads about a run, and of the list of runs."""
    run = f"/api/v1/runs/{shape.name}"
    plain = [route.removeprefix("/api/v1/runs/{run}") for route in routes]
    plain = [route for route in plain if "{" not in route and "/compare" not in route]
    figures = [f"/figures/{figure}{form}" for figure in _FIGURES for form in ("", ".html")]
    for path in (*plain, *figures, *_VARIANTS):
        yield run + path.format(middle=shape.steps // 2, other=other)
    yield "/api/v1/runs?limit=50"


def memory_mb(pid: int, field: str) -> float:
    """Return a field of a process's memory: `VmRSS` now, `VmHWM` at its peak."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match[1]) * 1024 / 1e6


def measure(folder: Path, url: str, path: str) -> dict[str, float]:
    """Return the status, seconds, bytes and peaks of a read by a fresh collector."""
    with capacity.collector(folder, url) as (process, address), httpx.Client(base_url=address, timeout=600) as client:
        client.get("/readyz").raise_for_status()
        time.sleep(0.2)
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")
        before, began = memory_mb(process.pid, "VmRSS"), time.perf_counter()
        with client.stream("GET", path) as answer:
            size = sum(len(part) for part in answer.iter_raw())
        return {
            "status": answer.status_code,
            "s": time.perf_counter() - began,
            "answer_mb": size / 1e6,
            "growth_mb": memory_mb(process.pid, "VmHWM") - before,
            "peak_mb": memory_mb(process.pid, "VmHWM"),
        }


def routes_of_runs(folder: Path, url: str) -> list[str]:
    """Return the routes about one run, from the collector's own description."""
    with capacity.collector(folder, url) as (_, address):
        paths = httpx.get(f"{address}/openapi.json", timeout=60).raise_for_status().json()["paths"]
    return [path for path, methods in paths.items() if path.startswith("/api/v1/runs/{run}") and "get" in methods]


def main() -> None:
    """Write the runs, measure, and print a row for each read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="*", help="only these runs")
    parser.add_argument("--match", default="", help="only paths with this text")
    parser.add_argument("--database-url", help="use this database; missing runs are written to it")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    shapes = [s for s in (SMALL if options.smoke else SHAPES) if not options.runs or s.name in options.runs]
    results: dict[str, dict[str, dict[str, float]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = options.database_url or databases.sqlite(folder)
        store = Store(url)
        store.migrate()
        for shape in shapes:
            if store.run(shape.name) is None:
                began = time.perf_counter()
                reads.fill(store, shape)
                print(f"{shape.name}: written in {time.perf_counter() - began:.0f} s", flush=True)
        store.close()
        routes = routes_of_runs(folder, url)
        print("| run | read | status | s | answer, MB | growth, MB | peak, MB |\n|---|---|---|---|---|---|---|")
        for shape, other in zip(shapes, [*shapes[1:], shapes[0]], strict=True):
            for path in requests(routes, shape, other.name):
                if options.match in path:
                    row = measure(folder, url, path)
                    results.setdefault(shape.name, {})[path.removeprefix(f"/api/v1/runs/{shape.name}")] = row
                    cells = [f"{row[name]:.1f}" for name in ("s", "answer_mb", "growth_mb", "peak_mb")]
                    print("|", " | ".join([shape.name, path, f"{row['status']:.0f}", *cells]), "|", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
