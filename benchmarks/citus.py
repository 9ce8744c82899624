"""Measure a Citus cluster of a coordinator and two workers against one PostgreSQL, all on this machine.

    sudo benchmarks/citus.sh SOURCE                  # builds Citus, then runs this
    python -m benchmarks.citus --programs FOLDER [--user nobody] [--rounds 3] [--batches 60] [--json FILE] [--smoke]

- *Ingest and reads*, interleaved: eight clients flood a collector with one run of eight ranks, or with eight runs of a
  rank. Each run is then read once. The connections are not encrypted.
- *Statements* of a transaction and of each read, by node, from the servers' logs.
- *Faults*: workers that stop, connections that are cut at `COMMIT`, a lock that is held (`citus_faults`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from ddpobs_server.store import Arrival, Store

from benchmarks import capacity, citus_faults, loads, tables
from benchmarks.rig import cluster
from ddpobs import wire

SETTINGS = ("shared_preload_libraries = 'citus'", "citus.node_conninfo = 'sslmode=disable'", "max_connections = 200")
_CLIENTS = 8
_READS = {"steps": "steps", "buckets": "buckets", "diagnostics": "diagnostics"}
_OF_SHARDS = ("public.", "pg_total_relation_size")
"""What a statement about a shard contains, and what only those of the size of the database contain."""
Figures = dict[str, dict[str, dict[str, float]]]
"""Medians by load, target and name."""


def flood(url: str, runs: Sequence[str], batches: int) -> dict[str, float]:
    """Flood a collector on a database, then read each of its runs once.

    Returns:
        The results of `capacity.drive`, `lost` spans, and the median time of each read in ms.
    """
    load = dataclasses.replace(loads.flood(_CLIENTS, batches), runs=tuple(runs))
    with (
        tempfile.TemporaryDirectory() as folder,
        capacity.senders(_CLIENTS, capacity.send, load) as pipes,
        capacity.collector(Path(folder), url) as (process, address),
    ):
        result = capacity.drive(pipes, process.pid, address)
        result["lost"] = result.pop("spans") - sum(capacity.stored(address, run) for run in runs)
        for name, path in _READS.items():
            result[f"{name}_ms"] = statistics.median(_read_ms(f"{address}/api/v1/runs/{run}/{path}") for run in runs)
        result["list_ms"] = statistics.median(_read_ms(f"{address}/api/v1/runs?limit={n}") for n in range(40, 50))
    return result


def _read_ms(url: str) -> float:
    began = time.perf_counter()
    httpx.get(url, timeout=60).raise_for_status()
    return 1e3 * (time.perf_counter() - began)


def compared(targets: dict[str, str], rounds: int, batches: int) -> Figures:
    """Medians of `flood` over interleaved rounds. Every round has runs of its own."""
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for number in range(rounds):
        for count in (1, _CLIENTS):
            load = "one run of 8 ranks" if count == 1 else "8 runs of a rank"
            order = list(targets) if number % 2 else list(reversed(targets))
            for target in order:
                place = list(targets).index(target)
                runs = [f"r{number}-t{place}-{count}-{index}" for index in range(count)]
                result = flood(targets[target], runs, batches)
                print(f"round {number + 1}, {load}, {target}: {result['spans_per_s'] / 1e6:.2f} M spans/s", flush=True)
                found.setdefault(load, {}).setdefault(target, []).append(result)
    return {
        load: {target: _medians(results) for target, results in by_target.items()} for load, by_target in found.items()
    }


def _medians(results: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(result[name] for result in results) for name in results[0]}


def statements(nodes: Sequence[cluster.Server]) -> dict[str, Any]:
    """Statements about a run by node: the first takes the collector's, the others have the shards.

    Returns:
        `transaction`: statements on the coordinator, then on each worker, of a transaction with batches of 64 ranks
        that it has seen before; `prepared`: those of a two-phase commit among them; `reads`: for each read, the number
        of workers that it visits.
    """
    store = Store(nodes[0].url)
    load = loads.Load(64, 4, 20, 2, 0.0, 1, ("counted",))
    for seq in range(3):
        store.ingest(_arrivals(load, seq))
    logs = _logged(nodes, lambda: store.ingest(_arrivals(load, 3)))
    own = [
        text
        for text in logs[0]
        if "public." not in text and text.split(maxsplit=1)[0] in {"SELECT", "SET", "INSERT", "UPDATE"}
    ]
    found = {
        "transaction": [len([text for text in own if "waiting_pid" not in text]), *map(_of_shards, logs[1:])],
        "prepared": sum(text.startswith("PREPARE TRANSACTION") for log in logs for text in log),
    }
    run, attempt = "counted", "a" * 16
    reads: dict[str, Callable[[], Any]] = {
        "run": lambda: store.run(run),
        "attempts": lambda: store.attempt_summaries(run),
        "sources": lambda: store.sources(run, attempt),
        "layouts": lambda: store.layout_outlines(run, attempt),
        "rollups": lambda: store.rollups(run, attempt),
        "buckets": lambda: store.bucket_rollups(run, attempt, 100),
        "steps": lambda: store.steps(run, attempt),
        "spans": lambda: store.spans(run, attempt),
        "fingerprints": lambda: store.differing_fingerprints(run, attempt),
    }
    found["reads"] = {
        name: sum(_of_shards(log) > 0 for log in _logged(nodes, read)[1:]) for name, read in reads.items()
    }
    store.close()
    return found


def _arrivals(load: loads.Load, seq: int) -> list[Arrival]:
    sent = [wire.encode(loads.batch(load, rank, seq)) for rank in range(load.ranks)]
    return [Arrival(wire.decode(body, wire.MSGPACK, 10**6), b"", len(body), 10**18 + seq) for body in sent]


def _logged(nodes: Sequence[cluster.Server], call: Callable[[], object]) -> list[list[str]]:
    with ExitStack() as stack:
        logs = [stack.enter_context(node.statements()) for node in nodes]
        call()
    return logs


def _of_shards(log: Sequence[str]) -> int:
    return sum(_OF_SHARDS[0] in text and _OF_SHARDS[1] not in text for text in log)


def checks(coordinator: cluster.Server, worker: cluster.Server) -> list[str]:
    """What `ddpobs-server check` reports about the cluster, with all nodes and while a worker is stopped."""
    found = [_check(coordinator)]
    worker.stop()
    found.append(_check(coordinator))
    worker.start()
    return found


def _check(server: cluster.Server) -> str:
    command = [sys.executable, "-m", "ddpobs_server.app", "check", "--database-url", server.url]
    text = subprocess.run(command, check=False, capture_output=True, text=True).stdout
    return next(line for line in text.splitlines() if "cluster" in line)


def table(found: Figures) -> str:
    """Markdown table of the medians. Those of reads vary with other load more than with the database."""
    names = {
        "spans_per_s": "spans a second",
        "ack_p99_ms": "99 % acknowledged within, ms",
        "diagnostics_ms": "diagnosis, ms",
        "steps_ms": "steps, ms",
        "buckets_ms": "buckets, ms",
        "list_ms": "list, ms",
    }
    rows = [
        [load, target, *(f"{results[name]:,.0f}" for name in names)]
        for load, by_target in found.items()
        for target, results in sorted(by_target.items(), reverse=True)
    ]
    return tables.rows_of(["load", "database", *names.values()], rows)


def main() -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, required=True, help="folder of PostgreSQL's programs, with Citus")
    parser.add_argument("--user", default="nobody", help="unprivileged user that runs the servers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=60, help="batches of 5,000 spans of each client")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    if options.smoke:
        options.rounds, options.batches = 1, 2
    with tempfile.TemporaryDirectory(prefix="ddpobs-citus-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        one = cluster.Server(options.programs, folder / "one", options.user, SETTINGS[2:])
        nodes = [cluster.Server(options.programs, folder / node, options.user, SETTINGS) for node in ("c", "a", "b")]
        with cluster.running([one, *nodes]):
            cluster.join(nodes[0], nodes[1:], [node.port for node in nodes[1:]])
            cluster.distribute(nodes[0])
            targets = {"PostgreSQL": one.url, "Citus": nodes[0].url, "Citus, by a worker": nodes[1].url}
            figures = compared(targets, options.rounds, options.batches)
            print(table(figures))
            found = {"figures": figures, "statements": statements(nodes), "checks": checks(nodes[0], nodes[2])}
        (folder / "faults").mkdir(mode=0o755)
        found["faults"] = citus_faults.measure(options.programs, folder / "faults", options.user, SETTINGS)
    print(json.dumps({name: result for name, result in found.items() if name != "figures"}, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
