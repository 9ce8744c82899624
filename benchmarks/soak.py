"""Run a collector for minutes under faults drawn at random, then compare its store with the acknowledgements.

    python -m benchmarks.soak [--seconds 600] [--runs 5000] [--seed 0] [--postgres] [--apart] [--json FILE] [--smoke]

The workspace `quiet` sends batches of 400 spans and repeats each until it is acknowledged, as a rank does. Beside it
`soak_load.py` works in turns, within limits of its workspaces. The workspace `crowd` has thousands of runs, which send,
and are listed and scraped. The workspace `loud` sends batches that are costly to keep, decompression bombs and hostile
text, tries to begin ever more runs, and requests reports, figures and comparisons, some of which it leaves unread.

With `--apart` the collector only takes batches. Another one on its database, which yields the processor to it, serves
the reads and diagnoses the runs.

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
  while the load works on another collector of this machine, both by turns of the same round: the load's clients share
  the processors. A turn alone shows what they cost, and a second one the noise.
- No bomb is stored, and no response is an internal error.

Exits with 1 if a condition fails.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx
from ddpobs_server.store import Store

from benchmarks import soak_load, stepped_clock
from benchmarks.collector_faults import Faults
from benchmarks.reads import arrival
from benchmarks.rig import databases
from benchmarks.soak_figures import (
    BESIDE,
    ELSEWHERE,
    FINISHED,
    FINISHED_BATCHES,
    MAX_RUNS,
    TURNS,
    UNDER_WAY_MB,
    Record,
    broken_conditions,
    figures,
)
from benchmarks.tenants import Background, Collector, Tenant, new_tokens
from ddpobs import wire

_PLACES = {BESIDE: soak_load.HERE, ELSEWHERE: soak_load.ELSEWHERE}
_PERIOD_S, _TURN_S = 0.1, 8.0
_READER_NICE = 10
_SETTINGS = {"max_under_way_mb": UNDER_WAY_MB, "lost_after_s": 5, "keep_runs_days": 30, "keep_spans_days": 30}
_LIMITS: dict[str, dict[str, float]] = {
    "loud": {"max_runs": MAX_RUNS, "batches_per_s": 10.0, "reads_per_s": 0.5},
    "crowd": {"batches_per_s": 10.0, "reads_per_s": 0.5},
}


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

    def count(self, sent: Any) -> None:
        """Record the acknowledgements of `send`, until its connection `sent` ends."""
        with suppress(EOFError, OSError):
            while True:
                self.record.latencies_s.append(sent.recv())
                self.record.acknowledged += 1

    def watch(self, client: httpx.Client, _number: int) -> None:
        """Record the memory, and that of batches under way."""
        record = self.record
        record.memory.append(self._collector.memory_bytes())
        record.peak_bytes = max(record.peak_bytes, self._collector.memory_bytes("VmHWM"))
        own = client.get(f"{self._collector.url}/metrics?only=collector", headers=self._quiet.headers)
        if match := re.search(r"\nddpobs_server_under_way_bytes (\S+)", own.text):
            record.under_way_bytes = max(record.under_way_bytes, float(match[1]))
        time.sleep(1)

    def read(self, client: httpx.Client, _number: int) -> None:
        """Scrape and read both workspaces beside the load."""
        for tenant in (self._quiet, self._loud) if self.has_load else ():
            run = tenant.run if tenant is self._quiet else soak_load.HOSTILE
            for path in (
                "/metrics",
                *("/api/v1/runs" + rest for rest in ("", f"/{run}/diagnostics", f"/{run}/unused")),
            ):
                answer = client.get(self._collector.reading.url + path, headers=tenant.headers)
                self.record.answer_bytes = max(self.record.answer_bytes, len(answer.content))
        time.sleep(1)


def send(quiet: Tenant, sent: Any) -> None:
    """Send batch after batch, each until it is acknowledged; put (time, seconds) of each into a connection.

    This is a process of its own: reads on another thread would delay it.
    """
    with httpx.Client(timeout=40) as client, suppress(OSError):
        for number in count():
            payload = quiet.batch(0, number)
            began = time.monotonic()
            while not _is_acknowledged(quiet, client, payload):
                time.sleep(0.2)
            sent.send((began, time.monotonic() - began))
            time.sleep(_PERIOD_S)


def _is_acknowledged(quiet: Tenant, client: httpx.Client, payload: wire.Batch) -> bool:
    with suppress(httpx.HTTPError):
        return quiet.put(client, payload).status_code in (200, 201)
    return False


@contextmanager
def sending(quiet: Tenant, clients: Clients) -> Iterator[None]:
    """Send batches in a process of its own, and count their acknowledgements."""
    context = multiprocessing.get_context("fork")
    received, sent = context.Pipe(duplex=False)
    process = context.Process(target=send, args=(quiet, sent))
    process.start()
    sent.close()
    thread = threading.Thread(target=clients.count, args=(received,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        process.terminate()
        process.join(10)
        thread.join(10)


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
    quiet = Tenant(Collector(Path(), url), "", FINISHED)
    batches = [quiet.batch(0, seq, f"quiet/{FINISHED}") for seq in range(FINISHED_BATCHES)]
    store.ingest(list(map(arrival, batches)))
    soak_load.fill_crowd(store, runs)
    store.close()
    limit(url)
    if url.startswith("sqlite"):
        shutil.copy(file, template)


def run(folder: Path, url: str, server: Any, seconds: float, *, runs: int, seed: int, apart: bool) -> dict[str, Any]:
    """Run the soak, then check the store."""
    names = ("quiet", "loud", "crowd")
    secrets, tokens = new_tokens(*names)
    fill = partial(prepare, url, tokens, runs, folder / "template.db")
    fill()
    clock = folder / "clock"
    stepped_clock.set_offset(clock, 0)
    command = (sys.executable, str(Path(stepped_clock.__file__)), str(clock))
    collector = Collector(folder, url, dict(_SETTINGS), command=command, reader=_reader(folder, url) if apart else None)
    collector.start()
    other = _other(folder / "other", server, lambda url: prepare(url, tokens, runs, folder / "template.db"))
    quiet, loud = (Tenant(collector, secret, name) for secret, name in zip(secrets, names[:2], strict=False))
    addresses = [_address(each) for each in (collector, other)]
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
            stack.enter_context(sending(Tenant(addresses[0], secrets[0], names[0]), clients))
            for work in (clients.watch, clients.read):
                stack.enter_context(Background(partial(work, stack.enter_context(httpx.Client(timeout=40)))))
            while time.monotonic() < deadline:
                _round(clients, place, turn_s)
                faults.draw(min(5.0, turn_s))
    finally:
        collector.end()
        other.end()
    return figures(clients.record, faults.outcome, url, strange) | {"answers": dict(sorted(answers.items()))}


def _reader(folder: Path, url: str) -> Collector:
    """A collector for reads, which yields the processor to others."""
    own = folder / "reader"
    own.mkdir()
    command = ("nice", "-n", str(_READER_NICE), *Collector.command)
    return Collector(own, url, dict(_SETTINGS), command=command)


def _address(collector: Collector) -> Collector:
    """The collector without its processes, which can be passed to other processes."""
    reader = None if collector.reader is None else _address(collector.reader)
    return Collector(collector.folder, collector.database_url, port=collector.port, reader=reader)


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
    for kind in random.Random(len(turns)).sample(TURNS, len(TURNS)):  # Each may follow the turn beside the load.
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
    parser.add_argument("--apart", action="store_true", help="batches and reads have a collector each")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    seconds, runs = (20.0, 40) if options.smoke else (options.seconds, options.runs)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(databases.postgresql_server()) if options.postgres else None
        url = databases.new_database(server) if server is not None else databases.sqlite(folder)
        result = run(folder, url, server, seconds, runs=runs, seed=options.seed, apart=options.apart)
    for name, value in result.items():
        print(f"{name:>26}  {value:,.1f}" if isinstance(value, float) else f"{name:>26}  {value}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if broken := broken_conditions(result, timed=not options.smoke):
        sys.exit("; ".join(broken))


if __name__ == "__main__":
    main()
