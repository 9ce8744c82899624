"""Run a collector for minutes under faults drawn at random, then compare its store with the acknowledgements.

    python -m benchmarks.soak [--seconds 600] [--runs 5000] [--seed 0] [--postgres] [--json FILE] [--smoke]

The workspace `quiet` sends batches of 400 spans and repeats each until it is acknowledged, as a rank does. Beside it
`soak_load.py` works in turns, within limits of its workspaces. The workspace `crowd` has thousands of runs, which send,
and are listed and scraped. The workspace `loud` sends batches that are costly to keep, decompression bombs and hostile
text, tries to begin ever more runs, and requests reports, figures and comparisons, some of which it leaves unread.

After each round of turns a fault begins (`collector_faults.py`): the collector is killed, also during an upgrade of its
schema, its disk has too little free space, its database stops or its file is locked, its file is moved away and back or
removed, its clock is set by an hour or a year, bodies stay unfinished, or answers stay unread.

At the end:

- Every acknowledged span is stored once. If the file was removed, this holds for the removed file up to that moment,
  and for the new one afterwards. Nothing is acknowledged while the file is away.
- A run that was stored at the start is still there: retention removes nothing while the clock is wrong.
- The limit of `loud`'s runs holds. The memory of batches under way, the largest answer and the peak of the process's
  memory stay within their bounds. Its memory is flat.
- The latency of `quiet` outside of outages is within its bound. Its median beside the load is at most 10 % above that
  alone, both by turns of the same round. A second turn alone shows the noise, and one in which the load works on
  another collector of this machine shows what its clients cost.
- No bomb is stored, and no response is an internal error.

Exits with 1 if a condition fails.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
from ddpobs_server.store import Store

from benchmarks import soak_load, stepped_clock
from benchmarks.collector_faults import Faults, Outcome
from benchmarks.pairs import Ratio, ratio
from benchmarks.reads import arrival
from benchmarks.rig import databases
from benchmarks.tenants import LOAD, Background, Collector, Tenant, new_tokens
from ddpobs import wire

MEMORY_BYTES = 1_500_000_000
"""Bound on the collector's peak memory under this load."""
P99_S, FLAT_RATIO = 2.0, 1.5
"""Bound on the latency outside of outages, and on the memory of the second half relative to the first."""
UNDER_WAY_MB, ANSWER_BYTES, MAX_RUNS = 256, 80_000_000, 5
"""Bounds on batches under way, on an answer (64 MB of runs, and the collector's own metrics), and on loud's runs."""
NEIGHBOUR = 1.10
"""Bound on the latency of `quiet` beside the load, as a multiple of that alone."""
ALONE, AGAIN, BESIDE, ELSEWHERE = "alone", "alone once more", "beside", "elsewhere"
_TURNS = (ALONE, BESIDE, AGAIN, ELSEWHERE)
_PLACES = {BESIDE: soak_load.HERE, ELSEWHERE: soak_load.ELSEWHERE}
_PERIOD_S, _TURN_S, _SETTLE_S = 0.1, 8.0, 2.0
_SETTINGS = {"max_under_way_mb": UNDER_WAY_MB, "lost_after_s": 5, "keep_runs_days": 30, "keep_spans_days": 30}
_LIMITS: dict[str, dict[str, float]] = {
    "loud": {"max_runs": MAX_RUNS, "batches_per_s": 10.0, "reads_per_s": 0.5},
    "crowd": {"batches_per_s": 10.0, "reads_per_s": 0.5},
}
_FINISHED, _FINISHED_BATCHES = "finished", 20
"""Name and batches of the run that is stored at the start."""
_SPANS = LOAD.steps * LOAD.buckets


@dataclass
class Record:
    """Figures of a soak.

    Attributes:
        acknowledged: Number of batches.
        latencies_s: (time, seconds) of each acknowledged batch.
        turns: (kind, begin, end) of each turn, in rounds of `_TURNS`.
        memory: The collector's resident bytes, again and again.
        peak_bytes: Largest peak of any of its processes.
        under_way_bytes: Largest memory of batches under way.
        answer_bytes: Size of the largest answer.
    """

    acknowledged: int = 0
    latencies_s: list[tuple[float, float]] = field(default_factory=list)
    turns: list[tuple[str, float, float]] = field(default_factory=list)
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
        self.record, self.has_load = Record(), True

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
        """Record memory, and beside the load also scrape and read both workspaces."""
        record = self.record
        record.memory.append(self._collector.memory_bytes())
        record.peak_bytes = max(record.peak_bytes, self._collector.memory_bytes("VmHWM"))
        for tenant in (self._quiet, self._loud) if self.has_load else ():
            run = tenant.run if tenant is self._quiet else soak_load.HOSTILE
            for path in (
                "/metrics",
                *("/api/v1/runs" + rest for rest in ("", f"/{run}/diagnostics", f"/{run}/unused")),
            ):
                answer = client.get(self._collector.url + path, headers=tenant.headers)
                record.answer_bytes = max(record.answer_bytes, len(answer.content))
                if match := re.search(rb"\nddpobs_server_under_way_bytes (\S+)", answer.content):
                    record.under_way_bytes = max(record.under_way_bytes, float(match[1]))
        time.sleep(1)


def limit(url: str) -> None:
    """Store the limits of the workspaces with load."""
    store = Store(url)
    for workspace, limits in _LIMITS.items():
        store.set_workspace_limits(workspace, limits)
    store.close()


def prepare(url: str, tokens: list[Any], runs: int, template: Path) -> None:
    """Create tables, tokens, limits, a finished run and the crowd's runs in a new database.

    A SQLite file is copied to `template`, and from there the next time.
    """
    file = Path(url.removeprefix("sqlite:///"))
    if template.exists():
        shutil.copy(template, file)
        return
    store = Store(url)
    store.migrate()
    for token in tokens:
        store.add_token(token)
    quiet = Tenant(Collector(Path(), url), "", _FINISHED)
    batches = [quiet.batch(0, seq, f"quiet/{_FINISHED}") for seq in range(_FINISHED_BATCHES)]
    store.ingest(list(map(arrival, batches)))
    soak_load.fill_crowd(store, runs)
    store.close()
    limit(url)
    if url.startswith("sqlite"):
        shutil.copy(file, template)


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


def neighbour(record: Record, calm: Sequence[tuple[float, float]]) -> dict[str, Ratio]:
    """Ratio of the medians of `quiet` in each kind of turn over those alone, by rounds."""
    medians: dict[str, list[float]] = {kind: [] for kind in _TURNS}
    for first in range(0, len(record.turns) - len(_TURNS) + 1, len(_TURNS)):
        in_round: dict[str, list[float]] = {name: [] for name in medians}
        for kind, began, ended in record.turns[first : first + len(_TURNS)]:
            in_round[kind] += [seconds for at, seconds in calm if began + _SETTLE_S <= at < ended]
        if all(in_round.values()):
            for kind, seconds in in_round.items():
                medians[kind].append(median(seconds))
    if not medians[ALONE]:
        return {}
    found = {kind: ratio([medians[kind]], [medians[ALONE]]) for kind in _TURNS[1:]}
    return found | {"beside over elsewhere": ratio([medians[BESIDE]], [medians[ELSEWHERE]])}


def figures(record: Record, outcome: Outcome, url: str, strange: Counter[str]) -> dict[str, Any]:
    """The conditions' figures."""
    timed = [
        (at, seconds)
        for at, seconds in record.latencies_s
        if not any(at <= end and at + seconds >= begin for begin, end in outcome.outages)
    ]
    calm = [seconds for _, seconds in timed]
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
        "strange": dict(strange),
        "neighbour": {kind: vars(found) for kind, found in neighbour(record, timed).items()},
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
        f"responses that no client should get: {result['strange']}": result["strange"],
        f"the neighbour's median: {result['neighbour']}": timed and result["neighbour"][BESIDE]["middle"] > NEIGHBOUR,
        f"the 99th percentile of the latency is {result['p99_ms']:.0f} ms": timed and result["p99_ms"] > P99_S * 1e3,
    }
    return [text for text, is_broken in checks.items() if is_broken]


def run(folder: Path, url: str, server: Any, seconds: float, *, runs: int, seed: int) -> dict[str, Any]:
    """Run the soak, then check the store."""
    names = ("quiet", "loud", "crowd")
    secrets, tokens = new_tokens(*names)
    fill = partial(prepare, url, tokens, runs, folder / "template.db")
    fill()
    clock = folder / "clock"
    stepped_clock.set_offset(clock, 0)
    command = (sys.executable, str(Path(stepped_clock.__file__)), str(clock))
    collector = Collector(folder, url, dict(_SETTINGS), command=command)
    collector.start()
    other = _other(folder / "other", server, lambda url: prepare(url, tokens, runs, folder / "template.db"))
    quiet, loud = (Tenant(collector, secret, name) for secret, name in zip(secrets, names[:2], strict=False))
    # Without its process, a collector can be passed to other processes.
    addresses = [Collector(folder, url, port=each.port) for each in (collector, other)]
    loads = {
        name: (Tenant(addresses[0], secret, name), Tenant(addresses[1], secret, name))
        for secret, name in zip(secrets, names, strict=True)
    }
    clients = Clients(collector, quiet, loud)
    faults = Faults(
        collector,
        loud,
        server,
        clock,
        acknowledged=lambda: clients.record.acknowledged,
        prepare=fill,
        limit=lambda: limit(url),
        seed=seed,
    )
    turn_s = min(_TURN_S, seconds / 60)
    deadline = time.monotonic() + seconds
    makers: list[Callable[[], soak_load.Load]] = [
        partial(soak_load.Costly, loads["loud"], seed),
        partial(soak_load.Bombs, loads["loud"], seed),
        partial(soak_load.Readers, loads["loud"], seed),
        partial(soak_load.Crowd, loads["crowd"], seed, runs),
    ]
    try:
        with ExitStack() as stack:
            place, answers, strange = stack.enter_context(soak_load.running(makers))
            for work in (clients.send, clients.watch):
                client = stack.enter_context(httpx.Client(timeout=40))
                stack.enter_context(Background(lambda number, work=work, client=client: work(client, number)))  # type: ignore[misc]
            while time.monotonic() < deadline:
                _round(clients, place, turn_s)
                faults.draw(min(5.0, turn_s))
    finally:
        collector.end()
        other.end()
    return figures(clients.record, faults.outcome, url, strange) | {"answers": dict(sorted(answers.items()))}


def _other(folder: Path, server: Any, fill: Callable[[str], None]) -> Collector:
    """Start another collector, with a database as the first one's at its start."""
    folder.mkdir()
    url = databases.new_database(server) if server is not None else databases.sqlite(folder)
    fill(url)
    other = Collector(folder, url, dict(_SETTINGS))
    other.start()
    return other


def _round(clients: Clients, place: Any, turn_s: float) -> None:
    """A turn of each kind; the load works in those beside it, and goes on during the next fault."""
    turns = clients.record.turns
    for kind in random.Random(len(turns)).sample(_TURNS, len(_TURNS)):  # Each may follow the turn beside the load.
        clients.has_load = kind == BESIDE
        place.value = _PLACES.get(kind, soak_load.IDLE)
        began = time.monotonic()
        time.sleep(turn_s)
        turns.append((kind, began, time.monotonic()))
    clients.has_load, place.value = True, soak_load.HERE


def main() -> None:
    """Run, print the figures, and exit with 1 if a condition does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--runs", type=int, default=5000, help="runs of the workspace `crowd`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--postgres", action="store_true", help="use a new PostgreSQL server")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    seconds, runs = (20.0, 40) if options.smoke else (options.seconds, options.runs)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(databases.postgresql_server()) if options.postgres else None
        url = databases.new_database(server) if server is not None else databases.sqlite(folder)
        result = run(folder, url, server, seconds, runs=runs, seed=options.seed)
    for name, value in result.items():
        print(f"{name:>26}  {value:,.1f}" if isinstance(value, float) else f"{name:>26}  {value}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if broken := broken_conditions(result, timed=not options.smoke):
        sys.exit("; ".join(broken))


if __name__ == "__main__":
    main()
