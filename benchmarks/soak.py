"""Run a collector for minutes under faults drawn at random, then compare its store with the acknowledgements.

    python -m benchmarks.soak [--seconds 600] [--seed 0] [--postgres] [--json FILE] [--smoke]

The workspace `quiet` sends batches of 400 spans and repeats each until it is acknowledged, as a rank does. The
workspace `loud` sends batches that are costly to keep, and tries to begin ever more runs. Every few seconds a fault
begins (`collector_faults.py`): the collector is killed, its disk has too little free space, its database stops or its
file is locked, its file is moved away and back or removed, its clock is set by an hour or a year, bodies stay
unfinished, or answers stay unread.

At the end:

- Every acknowledged span is stored once. If the file was removed, this holds for the removed file up to that moment,
  and for the new one afterwards. Nothing is acknowledged while the file is away.
- A run that was stored at the start is still there: retention removes nothing while the clock is wrong.
- The limit of `loud`'s runs holds. The memory of batches under way, the largest answer and the peak of the process's
  memory stay within their bounds. Its memory is flat.
- The latency of `quiet` outside of outages is within its bound.

Exits with 1 if a condition fails.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from ddpobs_server.store import Store

from benchmarks import stepped_clock
from benchmarks.collector_faults import Faults, Outcome
from benchmarks.reads import arrival
from benchmarks.rig import databases
from benchmarks.tenants import LOAD, Background, Collector, Tenant, hostile_batches, new_tokens
from ddpobs import wire

MEMORY_BYTES = 1_500_000_000
"""Bound on the collector's peak memory under this load."""
P99_S, FLAT_RATIO = 2.0, 1.5
"""Bound on the latency outside of outages, and on the memory of the second half relative to the first."""
UNDER_WAY_MB, ANSWER_BYTES, MAX_RUNS = 256, 80_000_000, 3
"""Bounds on batches under way, on an answer (64 MB of runs, and the collector's own metrics), and on loud's runs."""
_PERIOD_S = 0.1
_SETTINGS = {"max_under_way_mb": UNDER_WAY_MB, "lost_after_s": 5, "keep_runs_days": 30}
_FINISHED, _FINISHED_BATCHES = "finished", 20
"""Name and batches of the run that is stored at the start."""
_SPANS = LOAD.steps * LOAD.buckets


@dataclass
class Record:
    """Figures of a soak.

    Attributes:
        acknowledged: Number of batches.
        latencies_s: (time, seconds) of each acknowledged batch.
        memory: The collector's resident bytes, again and again.
        peak_bytes: Largest peak of any of its processes.
        under_way_bytes: Largest memory of batches under way.
        answer_bytes: Size of the largest answer.
    """

    acknowledged: int = 0
    latencies_s: list[tuple[float, float]] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    peak_bytes: int = 0
    under_way_bytes: float = 0
    answer_bytes: int = 0


class Clients:
    """The clients of both workspaces.

    Args:
        collector: The collector.
        quiet: The workspace whose batches are counted.
        loud: The workspace with costly batches.
    """

    def __init__(self, collector: Collector, quiet: Tenant, loud: Tenant) -> None:
        self._collector, self._quiet, self._loud = collector, quiet, loud
        self.record = Record()

    def send(self, client: httpx.Client, number: int) -> None:
        """Send a batch of `quiet` until it is acknowledged."""
        payload = self._quiet.batch(0, number)
        began = time.monotonic()
        while True:
            with suppress(httpx.HTTPError):
                if self._quiet.put(client, payload).status_code in (200, 201):
                    break
            time.sleep(0.2)
        self.record.acknowledged += 1
        self.record.latencies_s.append((began, time.monotonic() - began))
        time.sleep(_PERIOD_S)

    def watch(self, client: httpx.Client, _number: int) -> None:
        """Scrape and read both workspaces, and record memory and sizes."""
        record = self.record
        record.memory.append(self._collector.memory_bytes())
        record.peak_bytes = max(record.peak_bytes, self._collector.memory_bytes("VmHWM"))
        for tenant in (self._quiet, self._loud):
            run = tenant.run if tenant is self._quiet else "hostile"
            for path in (
                "/metrics",
                *("/api/v1/runs" + rest for rest in ("", f"/{run}/diagnostics", f"/{run}/unused")),
            ):
                answer = client.get(self._collector.url + path, headers=tenant.headers)
                record.answer_bytes = max(record.answer_bytes, len(answer.content))
                if match := re.search(rb"\nddpobs_server_under_way_bytes (\S+)", answer.content):
                    record.under_way_bytes = max(record.under_way_bytes, float(match[1]))
        time.sleep(1)

    def attack(self, client: httpx.Client, number: int) -> None:
        """Send batches of `loud` that are costly to keep."""
        for payload in hostile_batches(self._loud, number + 1):
            self._loud.put(client, payload)
        self._loud.put(client, self._loud.batch(0, 0, f"run-{number}"))
        time.sleep(0.5)


def prepare(url: str, tokens: list[Any]) -> None:
    """Create tables, tokens, limits and a finished run in a new database."""
    store = Store(url)
    store.migrate()
    for token in tokens:
        store.add_token(token)
    store.set_workspace_limits("loud", {"max_runs": MAX_RUNS, "batches_per_s": 20.0})
    quiet = Tenant(Collector(Path(), url), "", _FINISHED)
    batches = [quiet.batch(0, seq, f"quiet/{_FINISHED}") for seq in range(_FINISHED_BATCHES)]
    store.ingest(list(map(arrival, batches)))
    store.close()


def lost_and_doubled(url: str, run: str, first: int, last: int) -> tuple[int, int]:
    """Spans of the batches `first` to `last` (exclusive) that are not stored, and those that are stored twice."""
    store = Store(url)
    key = f"quiet/{run}"
    stored = store.run(key)
    lost = doubled = 0
    for begin in range(first, last, 100):
        end = min(begin + 100, last)
        spans = wire.Spans.from_table(np.zeros((len(wire.Spans.names), 0), np.int64))
        if stored is not None:
            _, spans = store.spans(key, stored.attempt, None, begin * LOAD.steps, end * LOAD.steps - 1)
        distinct = len(np.unique(np.stack([spans.step, spans.bucket]), axis=1).T)
        lost += (end - begin) * _SPANS - distinct
        doubled += len(spans) - distinct
    store.close()
    return lost, doubled


def figures(record: Record, outcome: Outcome, url: str) -> dict[str, Any]:
    """The conditions' figures."""
    calm = [
        seconds
        for at, seconds in record.latencies_s
        if not any(at <= end and at + seconds >= begin for begin, end in outcome.outages)
    ]
    resident = [size for size in record.memory if size]
    middle = len(resident) // 2
    urls, ends = [*(removed for removed, _ in outcome.removed), url], [end for _, end in outcome.removed]
    parts = zip(urls, [0, *ends], [*ends, record.acknowledged], strict=True)
    counts = [lost_and_doubled(each, "quiet", first, last) for each, first, last in parts]
    counts += [lost_and_doubled(each, _FINISHED, 0, _FINISHED_BATCHES) for each in urls]
    store = Store(url)
    runs = store.count_runs("loud")
    store.close()
    return {
        "acknowledged_spans": record.acknowledged * _SPANS,
        "lost_spans": sum(lost for lost, _ in counts),
        "doubled_spans": sum(doubled for _, doubled in counts),
        "acknowledged_without_file": outcome.acknowledged_without_file,
        "calm_batches": len(calm),
        "p50_ms": float(np.median(calm or [0.0])) * 1e3,
        "p99_ms": float(np.percentile(calm or [0.0], 99)) * 1e3,
        "peak_mb": record.peak_bytes / 1e6,
        "first_half_mb": max(resident[:middle], default=0) / 1e6,
        "second_half_mb": max(resident[middle:], default=0) / 1e6,
        "under_way_mb": record.under_way_bytes / 1e6,
        "largest_answer_mb": record.answer_bytes / 1e6,
        "loud_runs": runs,
        "faults": outcome.counts,
    }


def broken_conditions(result: dict[str, Any], *, timed: bool) -> list[str]:
    """The conditions that do not hold; `timed`: those on latency and growth, which need minutes of a quiet machine."""
    checks = {
        f"{result['lost_spans']} acknowledged spans are not stored": result["lost_spans"],
        f"{result['doubled_spans']} spans are stored twice": result["doubled_spans"],
        "batches are acknowledged while the file is away": result["acknowledged_without_file"],
        f"the peak of the memory is {result['peak_mb']:.0f} MB": result["peak_mb"] * 1e6 > MEMORY_BYTES,
        "the memory grows": timed and result["second_half_mb"] > FLAT_RATIO * result["first_half_mb"],
        f"{result['under_way_mb']:.0f} MB of batches are under way": result["under_way_mb"] > UNDER_WAY_MB,
        f"an answer has {result['largest_answer_mb']:.0f} MB": result["largest_answer_mb"] * 1e6 > ANSWER_BYTES,
        f"the workspace has {result['loud_runs']} runs": result["loud_runs"] > MAX_RUNS,
        f"the 99th percentile of the latency is {result['p99_ms']:.0f} ms": timed and result["p99_ms"] > P99_S * 1e3,
    }
    return [text for text, is_broken in checks.items() if is_broken]


def run(folder: Path, url: str, server: Any, seconds: float, seed: int) -> dict[str, Any]:
    """Run the soak, then check the store."""
    secrets, tokens = new_tokens("quiet", "loud")
    prepare(url, tokens)
    clock = folder / "clock"
    stepped_clock.set_offset(clock, 0)
    command = (sys.executable, str(Path(stepped_clock.__file__)), str(clock))
    collector = Collector(folder, url, dict(_SETTINGS), command=command)
    collector.start()
    quiet, loud = (Tenant(collector, secret, name) for secret, name in zip(secrets, ("quiet", "loud"), strict=True))
    clients = Clients(collector, quiet, loud)
    faults = Faults(
        collector,
        loud,
        server,
        clock,
        acknowledged=lambda: clients.record.acknowledged,
        prepare=lambda: prepare(url, tokens),
        seed=seed,
    )
    pause_s = min(5.0, seconds / 12)
    deadline = time.monotonic() + seconds
    try:
        with ExitStack() as stack:
            for work in (clients.send, clients.watch, clients.attack):
                client = stack.enter_context(httpx.Client(timeout=40))
                stack.enter_context(Background(lambda number, work=work, client=client: work(client, number)))  # type: ignore[misc]
            while time.monotonic() < deadline:
                time.sleep(pause_s)
                faults.draw(pause_s)
    finally:
        collector.end()
    return figures(clients.record, faults.outcome, url)


def main() -> None:
    """Run, print the figures, and exit with 1 if a condition does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--postgres", action="store_true", help="use a new PostgreSQL server")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    seconds = 12.0 if options.smoke else options.seconds
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(databases.postgresql_server()) if options.postgres else None
        url = databases.new_database(server) if server is not None else databases.sqlite(folder)
        result = run(folder, url, server, seconds, options.seed)
    for name, value in result.items():
        print(f"{name:>26}  {value:,.1f}" if isinstance(value, float) else f"{name:>26}  {value}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if broken := broken_conditions(result, timed=not options.smoke):
        sys.exit("; ".join(broken))


if __name__ == "__main__":
    main()
