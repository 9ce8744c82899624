"""Measure the fleet report, the list and its search in a workspace with thousands of runs.

    python -m benchmarks.fleet [--runs 20000] [--hosts 2] [--times 5] [--postgres] [--json FILE] [--smoke]

Each run has two ranks, and totals on its hosts over twelve weeks. The reads take turns. The last columns are the
collector's processor time, and the median as a multiple of that of the first page of the list.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
from ddpobs_server.store import DEFAULT_WORKSPACE, Store, schema
from sqlalchemy import select

from benchmarks.many_runs import fill
from benchmarks.reads import processor_s
from benchmarks.rig import databases
from benchmarks.rig.collector import collector

_WEEKS, _FLEET = 12, 200
"""Weeks of the report, and hosts of the fleet."""
_DAY_NS, _HOUR_NS, _GROUP = 86_400 * 10**9, 3600 * 10**9, 1000
_LOST = ("waiting_for_ranks", "exposed_comm", "checkpoint", "import", "model", "restart")


def write_totals(store: Store, hosts: int) -> int:
    """Write the totals of all runs, and move the runs into the default workspace. Returns the number of rows."""
    chance, now_ns = random.Random(1), time.time_ns()
    rows: list[dict[str, object]] = []
    with store._engine.begin() as connection:
        connection.execute(schema.runs.update().values(workspace=DEFAULT_WORKSPACE))
        runs = connection.execute(select(schema.runs.c.run_id, schema.runs.c.attempt, schema.runs.c.commits)).all()
        for run, attempt, commits in runs:
            began_ns = now_ns - int(chance.random() * 7 * (_WEEKS - 1) * _DAY_NS)
            seen = schema.runs.update().where(schema.runs.c.run_id == run)
            connection.execute(seen.values(last_seen_ns=began_ns + _HOUR_NS))
            for number in chance.sample(range(_FLEET), hosts):
                lost = {part: int(chance.random() * _HOUR_NS / 10) for part in _LOST}
                rows.append(
                    {
                        "run_id": run,
                        "attempt": attempt,
                        "host": f"node{number:03d}",
                        "made_ns": now_ns,
                        "commits": commits,
                        "began_ns": began_ns,
                        "wall_ns": _HOUR_NS,
                        "ranks": 1,
                        "has_rank_zero": 0,
                        "torch": "2.13",
                        "tags": json.dumps([f"team-{number % 20}"]),
                        "parts": json.dumps({"forward": _HOUR_NS // 3, "backward": _HOUR_NS // 3, **lost}),
                        "excess_ratio": chance.gauss(0, 0.03),
                    }
                )
        for begin in range(0, len(rows), _GROUP):
            connection.execute(schema.host_totals.insert(), rows[begin : begin + _GROUP])
    return len(rows)


def measure(url: str, pid: int, times: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the milliseconds of each read and of the collector's processors, in turns, after one read of each."""
    reads = {
        "first page of the list": "/runs?limit=50",
        "search that a run matches": "/runs?limit=30&search=node0+run-00001",
        "search that all runs match": "/runs?limit=30&search=NODE0+run",
        "fleet report": f"/fleet?weeks={_WEEKS}",
        "fleet report of one tag": f"/fleet?weeks={_WEEKS}&tag=team-1",
    }
    wall_ms: dict[str, list[float]] = {title: [] for title in reads}
    processor_ms: dict[str, list[float]] = {title: [] for title in reads}
    with httpx.Client(base_url=f"{url}/api/v1", timeout=300) as client:
        for turn in range(times + 1):
            for title, path in reads.items():
                began, before_s = time.perf_counter(), processor_s(pid)
                client.get(path).raise_for_status()
                if turn:
                    wall_ms[title].append((time.perf_counter() - began) * 1e3)
                    processor_ms[title].append((processor_s(pid) - before_s) * 1e3)
    return wall_ms, processor_ms


def main() -> None:
    """Write the runs and their totals, measure, and print a row for each read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--hosts", type=int, default=2, help="hosts of a run")
    parser.add_argument("--times", type=int, default=5, help="repetitions of each read")
    parser.add_argument("--postgres", action="store_true", help="use a new PostgreSQL server")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    if options.smoke:
        options.runs, options.times = 40, 1
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(databases.postgresql())(folder) if options.postgres else databases.sqlite(folder)
        store = Store(url)
        store.migrate()
        fill(store, options.runs)
        rows = write_totals(store, options.hosts)
        store.close()
        print(f"{options.runs} runs with {rows} totals are written", flush=True)
        running = stack.enter_context(collector(folder, database_url=url))
        found, processor_ms = measure(running.url, running.process.pid, options.times)
    medians = {title: statistics.median(ms) for title, ms in found.items()}
    first = medians["first page of the list"]
    print("\n| read | median, ms | smallest | largest | processor, ms | ratio |\n|---|---|---|---|---|---|")
    for title, ms in found.items():
        ratio, processor = medians[title] / first, statistics.median(processor_ms[title])
        print(f"| {title} | {medians[title]:,.0f} | {min(ms):,.0f} | {max(ms):,.0f} | {processor:,.0f} | {ratio:.1f} |")
    if options.json:
        options.json.write_text(
            json.dumps({"runs": options.runs, "totals": rows, "ms": found, "processor_ms": processor_ms}, indent=2)
            + "\n"
        )


if __name__ == "__main__":
    main()
