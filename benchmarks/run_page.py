"""Measure the page of a run of a million steps by 1,024 ranks in Chromium: requests, and the drawing of figures.

    python -m benchmarks.run_page [--steps 1000000] [--ranks 1024] [--times 5] [--postgres] [--json FILE] [--smoke]

The run is that of `benchmarks.whole_run`. The page draws a figure, then requests the next: the time from a figure's
answer to the next request is that of its drawing. A pulse arrives before each visit, so that no cached answer is used.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
from ddpobs_server.store import Store

from benchmarks import capacity, reads, whole_run
from benchmarks.rig import databases
from ddpobs import wire

_FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")
_PATIENCE_MS = 300_000
_ENTRIES = """() => performance.getEntriesByType('resource').filter(({ name }) => name.includes('/api/v1/'))
  .map(({ name, startTime, responseEnd, decodedBodySize }) => [name, startTime, responseEnd, decodedBodySize])"""


def visit(browser: Any, address: str) -> dict[str, float]:
    """Open the page and return milliseconds by title: of each request, of each figure's drawing, and of the whole."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.goto(address)
    page.locator("#view[aria-busy=false]").wait_for(timeout=_PATIENCE_MS)
    end = page.evaluate("performance.now()")
    # Refreshes of a live run may follow: the page's own requests are the first of each name.
    first: dict[str, tuple[float, float, float]] = {}
    for url, began, ended, size in page.evaluate(_ENTRIES):
        first.setdefault(_title(url), (began, ended, size))
    page.close()
    times = {title: ended - began for title, (began, ended, _) in first.items()}
    sizes = {f"{title}, kB": size / 1e3 for title, (_, _, size) in first.items()}
    figures = [title for title in first if title.startswith("figures/")]
    ends = [first[title][0] for title in figures[1:]] + [end]
    drawn = {f"drawing of {title}": until - first[title][1] for title, until in zip(figures, ends, strict=True)}
    findings_ms = first["diagnostics"][1]
    return times | drawn | sizes | {"until the findings": findings_ms, "until all figures": end}


def _title(url: str) -> str:
    path = url.partition("/api/v1/")[2].partition("?")[0]
    return path.removeprefix(f"runs/{whole_run.RUN}").lstrip("/") or "the run"


def measure(url: str, folder: Path, shape: reads.Shape, times: int) -> tuple[list[dict[str, float]], float]:
    """Return the times of each visit, and the collector's peak memory in MB."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("no chromium on this machine: apt-get install chromium")
    visits = []
    with capacity.collector(folder, url) as (process, address), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(_FLAGS))
        for _ in range(times + 1):
            seq = time.time_ns() // 1_000_000
            pulse = msgspec.structs.replace(reads.batch(shape, 0, 1), seq=seq, steps=None, spans=None)
            ingest = f"{address}/api/v1/runs/{whole_run.RUN}/sources/{pulse.source}/batches/{seq}"
            httpx.put(ingest, content=wire.encode(pulse), headers={"Content-Type": wire.MSGPACK}).raise_for_status()
            visits.append(visit(browser, f"{address}/runs/{whole_run.RUN}"))
        browser.close()
        return visits[1:], whole_run.peak_mb(process.pid)  # The first visit imports Bokeh.


def main() -> None:
    """Write the run, visit its page, and print a row for each request and drawing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--times", type=int, default=5, help="visits of the page")
    parser.add_argument("--postgres", action="store_true", help="use a new PostgreSQL server")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.ranks, options.times = 10_000, 12, 1
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(databases.postgresql())(folder) if options.postgres else databases.sqlite(folder)
        store = Store(url)
        store.migrate()
        level = 0 if options.smoke else whole_run.FINEST_LEVEL
        shape = whole_run.fill(store, options.ranks, options.steps, level)
        store.close()
        visits, memory_mb = measure(url, folder, shape, options.times)
    medians = {title: statistics.median(times[title] for times in visits) for title in visits[0]}
    print(f"| {options.steps:,} steps by {options.ranks:,} ranks | median |\n|---|---|")
    for title, value in medians.items():
        print(f"| {title} | {value:.0f}{'' if title.endswith('kB') else ' ms'} |")
    print(f"| the collector's peak memory | {memory_mb:.0f} MB |")
    if options.json:
        options.json.write_text(json.dumps({"median_ms": medians, "peak_mb": memory_mb}, indent=2) + "\n")


if __name__ == "__main__":
    main()
