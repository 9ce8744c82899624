"""Measure a collector that keeps thousands of runs: their list and search, scrapes, background work and retention.

    python -m benchmarks.many_runs [--runs 5000] [--times 5] [--postgres] [--json FILE] [--smoke]

Each run has two ranks. Half of the runs sent their last batch two days ago; the others are active. A neighbour in
another workspace sends a batch every 50 ms. Its latency while a kind of work goes on is divided by its latency alone.
The collector's processor time of a read includes the neighbour's batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
from ddpobs_server.store import Store
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import stepped_clock
from benchmarks.reads import Shape, arrival, batch, processor_s
from benchmarks.rig import databases
from benchmarks.tenants import Background, Collector, Tenant, new_tokens

RANKS, PAGE = 2, 500
_SEARCHES = {"a search that a run matches": "node0+run-00001", "a search that all runs match": "NODE0+run"}
"""Words; each run's host is node0."""
_SHAPE = Shape("crowd", RANKS, 40, 20, 40)
_GROUP, _DAY_NS = 64, 86_400 * 10**9
_PERIOD_S, _ALONE_S = 0.05, 5.0
_LAG_S = 100.0
"""Lag of the bins of runs that go on: a round a minute."""
_ROUNDS_S = 600.0
"""Longest time for background work on all runs."""


def fill(store: Store, runs: int) -> None:
    """Write the runs; the last batch of each second one arrived two days ago."""
    plain = [batch(_SHAPE, rank, 0) for rank in range(RANKS)]
    group = []
    for number in range(runs):
        for rank in range(RANKS):
            sent = arrival(msgspec.structs.replace(plain[rank], run=f"crowd/run-{number:05d}"))
            group.append(replace(sent, received_ns=sent.received_ns - 2 * _DAY_NS * (number % 2)))
        if len(group) >= _GROUP or number == runs - 1:
            store.ingest(group)
            group = []


class Neighbour:
    """Sends a batch every 50 ms, and records how long each took."""

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant
        self.sent: list[tuple[float, float]] = []

    def send(self, client: httpx.Client, number: int) -> None:
        """Send the next batch."""
        began = time.perf_counter()
        self._tenant.put(client, self._tenant.batch(0, number)).raise_for_status()
        ended = time.perf_counter()
        self.sent.append((began, ended - began))
        time.sleep(max(0.0, _PERIOD_S - (ended - began)))

    def median_ms(self, since: float) -> float:
        """Median latency of the batches since a time of `time.perf_counter`."""
        return statistics.median([seconds for began, seconds in self.sent if began >= since] or [0.0]) * 1e3


@contextmanager
def neighbour(tenant: Tenant) -> Iterator[Neighbour]:
    """A neighbour that sends during the block."""
    sender = Neighbour(tenant)
    with httpx.Client(timeout=60) as client, Background(lambda number: sender.send(client, number)):
        yield sender


class Crowd:
    """The client of the workspace with many runs."""

    def __init__(self, tenant: Tenant, client: httpx.Client) -> None:
        self._tenant, self._client, self._seq = tenant, client, 10

    def get(self, path: str) -> httpx.Response:
        """Read a path of the collector."""
        url = self._tenant.collector.url + path
        return self._client.get(url, headers=self._tenant.headers).raise_for_status()

    def pages(self) -> int:
        """Read the whole list, as the page does to sort it by step time. Returns the number of runs."""
        count, cursor = 0, ""
        while True:
            page = self.get(f"/api/v1/runs?limit={PAGE}{cursor}").json()
            count += len(page["runs"])
            if page["next"] is None:
                return count
            cursor = f"&cursor={page['next']}"

    def metric(self, name: str, **labels: str) -> float:
        """Value of one of the collector's own metrics."""
        for family in text_string_to_metric_families(self.get("/metrics?only=collector").text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        return 0.0

    def send(self, runs: int) -> None:
        """Send a pulse of one rank of a tenth of the active runs."""
        self._seq += 1
        plain = msgspec.structs.replace(batch(_SHAPE, 0, 1), steps=None, spans=None, seq=self._seq)
        for number in range(0, runs, 20):
            run = msgspec.structs.replace(plain, run=f"run-{number:05d}")
            self._tenant.put(self._client, run).raise_for_status()


def timed(action: Callable[[], Any], times: int, prepare: Callable[[], Any] = lambda: None) -> list[float]:
    """Milliseconds of each call of `action`, after a call of `prepare`."""
    found = []
    for _ in range(times):
        prepare()
        began = time.perf_counter()
        action()
        found.append((time.perf_counter() - began) * 1e3)
    return found


def until(condition: Callable[[], bool]) -> float:
    """Seconds until the condition holds.

    Raises:
        TimeoutError: It does not within ten minutes.
    """
    began = time.perf_counter()
    while not condition():
        if time.perf_counter() - began > _ROUNDS_S:
            raise TimeoutError("the collector did not finish its background work")
        time.sleep(0.5)
    return time.perf_counter() - began


def measure(collector: Collector, crowd: Tenant, quiet: Tenant, runs: int, times: int) -> dict[str, float]:
    """Read, scrape and wait for background work. Returns medians in ms, seconds, MB and the neighbour's ratios."""
    found: dict[str, float] = {}
    assert collector.process is not None
    pid = collector.process.pid
    with httpx.Client(timeout=300) as client, neighbour(quiet) as beside:
        many = Crowd(crowd, client)

        def during(title: str, work: Callable[[], list[float]]) -> None:
            began, before_s = time.perf_counter(), processor_s(pid)
            times = work()
            found[f"{title}, ms"] = statistics.median(times)
            found[f"{title}, processor ms"] = (processor_s(pid) - before_s) * 1e3 / len(times)
            found[f"neighbour during {title}, ratio"] = beside.median_ms(began) / alone_ms
            print(f"{title}: {found[f'{title}, ms']:,.0f} ms", flush=True)

        time.sleep(_ALONE_S)
        alone_ms = beside.median_ms(0)
        found["neighbour alone, ms"] = alone_ms
        began = time.perf_counter()
        time.sleep(_ALONE_S)
        found["neighbour alone once more, ratio"] = beside.median_ms(began) / alone_ms
        during("the first scrape", lambda: timed(lambda: many.get("/metrics?only=runs"), 1))
        during("a scrape without news", lambda: timed(lambda: many.get("/metrics?only=runs"), times))
        during(
            "a scrape after a tenth of the active runs sent",
            lambda: timed(lambda: many.get("/metrics?only=runs"), times, lambda: many.send(runs)),
        )
        during("the first page of the list", lambda: timed(lambda: many.get("/api/v1/runs?limit=50"), times))
        for title, words in _SEARCHES.items():
            path = f"/api/v1/runs?limit=30&search={words}"
            during(title, lambda path=path: timed(lambda: many.get(path), times))  # type: ignore[misc]
        during("the whole list, first", lambda: timed(many.pages, 1))
        during("the whole list", lambda: timed(many.pages, times))
        if (listed := many.pages()) < runs - runs // 2:  # Retention may have begun.
            raise RuntimeError(f"the list has {listed} of {runs} runs")
        began = time.perf_counter()
        removed = lambda: many.metric("ddpobs_server_removed_total", what="runs") >= runs // 2  # noqa: E731
        found["until the old runs are removed, s"] = until(removed)
        is_made = lambda: many.metric("ddpobs_server_bins_lag_seconds") < _LAG_S  # noqa: E731
        found["until all bins are made, s"] = until(is_made)
        found["neighbour during background work, ratio"] = beside.median_ms(began) / alone_ms
        found["memory, peak MB"] = collector.memory_bytes("VmHWM") / 1e6
        if (listed := many.pages()) != runs - runs // 2:
            raise RuntimeError(f"the list has {listed} of {runs - runs // 2} runs after retention")
    return found


def main() -> None:
    """Write the runs, measure, and print a row for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5000)
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
        secrets, tokens = new_tokens("crowd", "quiet")
        store = Store(url)
        store.migrate()
        for token in tokens:
            store.add_token(token)
        began = time.perf_counter()
        fill(store, options.runs)
        print(f"{options.runs} runs written in {time.perf_counter() - began:.0f} s", flush=True)
        store.close()
        settings: dict[str, object] = {"keep_runs_days": 1, "keep_share": 1, "keep_spans_days": 30}
        collector = Collector(folder, url, settings)
        if options.smoke:  # Its retention does not wait for a minute.
            stepped_clock.set_offset(folder / "clock", 0)
            collector.command = (sys.executable, str(Path(stepped_clock.__file__)), str(folder / "clock"))
        began = time.perf_counter()
        collector.start()
        started_s = time.perf_counter() - began
        stack.callback(collector.end)
        crowd, quiet = (Tenant(collector, secret, "run-00000") for secret in secrets)
        found = {"start, s": started_s} | measure(collector, crowd, quiet, options.runs, options.times)
    print("\n| | |\n|---|---|")
    for title, value in found.items():
        print(f"| {title} | {value:,.2f} |")
    if options.json:
        options.json.write_text(json.dumps({"runs": options.runs} | found, indent=2) + "\n")


if __name__ == "__main__":
    main()
