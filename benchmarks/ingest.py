"""Measure durable bucket spans a second over HTTP into SQLite, and bytes a span at rest.

    python -m benchmarks.ingest [--rounds 3] [--batches 800] [--clients 8] [--mlflow COMMAND] [--json FILE] [--smoke]

Each round floods a real collector on a fresh file (`benchmarks.capacity`). A batch counts once it is acknowledged,
after its commit with `synchronous=FULL`. For comparison, in the same round:

- a bare collector with the same clients, which writes bodies to SQLite unread (`bare_collector.py`): the ceiling of one
  Python process here;
- rows, one per span, by SQLite alone, with one such commit a batch;
- the disk, in blocks of a batch's size with an fsync each;
- MLflow's log-batch, if its command exists, with as many clients and a thousand metrics a request, into SQLite too.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import capacity, loads
from benchmarks.rig.ports import free_port
from ddpobs import wire

SPANS = loads.FLOOD_STEPS * loads.FLOOD_BUCKETS
"""Spans of a batch, as the exporter sends them by default."""
BARE = (sys.executable, str(Path(__file__).with_name("bare_collector.py")))
_METRICS = 1000
"""Most metrics that MLflow accepts in a request."""


def bare(load: loads.Load) -> dict[str, float]:
    """Send the same load, by the same clients, to a collector that only keeps bodies.

    Raises:
        RuntimeError: It did not start, did not acknowledge a batch, or lacks a batch.
    """
    with tempfile.TemporaryDirectory() as name, capacity.senders(load.clients, capacity.send, load) as pipes:
        file = Path(name) / "bare.db"
        with capacity.collector(Path(name), f"sqlite:///{file}", BARE) as (process, address):
            result = capacity.drive(pipes, process.pid, address)
        connection = sqlite3.connect(file)
        count = connection.execute("SELECT count(*) FROM batches").fetchone()[0]
        connection.close()
        if count != load.ranks * load.batches:
            raise RuntimeError(f"the bare collector has {count} of {load.ranks * load.batches} batches")
        return {"bare_spans_per_s": result["spans_per_s"], "bare_cpu_ns_per_span": result["cpu_ns_per_span"]}


def as_rows(folder: Path, batches: list[wire.Batch]) -> float:
    """Return spans a second with a row for each and SQLite alone: no HTTP, no checks, one durable commit a batch."""
    connection = sqlite3.connect(folder / "rows.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    names = wire.Spans.names
    keys = "run_id, source, module, revision, step, bucket"
    connection.execute(
        f"create table spans (run_id text, source text, {', '.join(f'{name} integer' for name in names)}, "
        f"primary key ({keys})) without rowid"
    )
    insert = f"insert into spans values ({', '.join('?' * (len(names) + 2))})"
    began = time.perf_counter()
    for batch in batches:
        columns = [getattr(batch.spans, name).tolist() for name in names]
        connection.execute("BEGIN")
        connection.executemany(insert, ((batch.run, batch.source, *row) for row in zip(*columns, strict=True)))
        connection.execute("COMMIT")
    elapsed_s = time.perf_counter() - began
    connection.close()
    return len(batches) * SPANS / elapsed_s


def mlflow_metrics_a_second(command: str, folder: Path, clients: int, requests: int) -> float:
    """Return the metrics a second that MLflow's own server accepts from as many clients."""
    port = free_port()
    with (folder / "mlflow.log").open("wb") as log:
        storage = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--default-artifact-root", str(folder)]
        server = subprocess.Popen(
            [command, "server", "--port", str(port), "--workers", "1", *storage], stdout=log, stderr=log
        )
    try:
        run = _mlflow_run(port, time.monotonic() + 120)
        context = multiprocessing.get_context("fork")
        senders = [context.Process(target=_log_batches, args=(port, run, n, requests)) for n in range(clients)]
        began = time.perf_counter()
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
        elapsed_s = time.perf_counter() - began
        if any(sender.exitcode for sender in senders):
            raise RuntimeError((folder / "mlflow.log").read_text()[-2000:])
        return clients * requests * _METRICS / elapsed_s
    finally:
        server.terminate()
        server.wait(30)


def _mlflow_run(port: int, deadline: float) -> str:
    while True:
        try:
            answer = _post(http.client.HTTPConnection("127.0.0.1", port), "runs/create", {"experiment_id": "0"})
            return str(answer["run"]["info"]["run_id"])
        except (OSError, http.client.HTTPException):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _log_batches(port: int, run: str, client: int, requests: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for number in range(requests):
        metrics = [
            {"key": f"{client}.{i % 20}", "value": i * 0.5, "timestamp": number, "step": number * 50 + i // 20}
            for i in range(_METRICS)
        ]
        _post(connection, "runs/log-batch", {"run_id": run, "metrics": metrics})


def _post(
    connection: http.client.HTTPConnection, endpoint: str, body: dict[str, object]
) -> dict[str, dict[str, dict[str, str]]]:
    headers = {"Content-Type": "application/json"}
    connection.request("POST", f"/api/2.0/mlflow/{endpoint}", json.dumps(body), headers)
    answer = connection.getresponse()
    text = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"MLflow answered {answer.status}: {text[:300]!r}")
    return json.loads(text)  # type: ignore[no-any-return]


def measure(rounds: int, count: int, clients: int, mlflow: str | None) -> dict[str, float]:
    """Return medians over interleaved rounds."""
    load = loads.flood(clients, max(1, count // clients))
    few = [loads.batch(load, 0, seq) for seq in range(min(load.batches, 40))]
    figures: dict[str, list[float]] = {}
    for number in range(rounds):
        order = [capacity.measure, bare] if number % 2 else [bare, capacity.measure]
        result = {key: value for call in order for key, value in call(load).items()}
        result["of_bare"] = result["spans_per_s"] / result["bare_spans_per_s"]
        with tempfile.TemporaryDirectory() as name:
            size = int(result["bytes_per_span"] * SPANS)
            result["row_spans_per_s"] = as_rows(Path(name), few)
            result["disk_mb_per_s"] = capacity.fsyncs_a_second(Path(name), size, 200) * size / 1e6
            if mlflow:
                result["mlflow_metrics_per_s"] = mlflow_metrics_a_second(mlflow, Path(name), clients, 8)
        result["stored_mb_per_s"] = result["spans_per_s"] * result["bytes_per_span"] / 1e6
        print(
            f"round {number + 1}: {result['spans_per_s'] / 1e6:.2f} M spans/s, "
            f"bare {result['bare_spans_per_s'] / 1e6:.2f}, ratio {result['of_bare']:.2f}",
            flush=True,
        )
        for key, value in result.items():
            figures.setdefault(key, []).append(value)
    return {key: statistics.median(values) for key, values in figures.items()}


def main() -> None:
    """Measure, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=800)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument(
        "--mlflow", default=shutil.which("mlflow"), help="MLflow's command; without it MLflow is not compared"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    if options.smoke:
        options.rounds, options.batches, options.clients = 1, 8, 2
    m = measure(options.rounds, options.batches, options.clients, options.mlflow)
    spans, rows, disk, stored = (
        m[name] for name in ("spans_per_s", "row_spans_per_s", "disk_mb_per_s", "stored_mb_per_s")
    )
    print(
        f"\n{options.batches} batches of {SPANS} spans, {options.clients} clients, medians of {options.rounds} rounds\n"
        f"over HTTP, acknowledged after commit  {spans:12,.0f} spans/s   {m['bytes_per_span']:.2f} B/span   "
        f"{m['cpu_ns_per_span']:.0f} ns/span of the collector's processor   p99 {m['ack_p99_ms']:.0f} ms\n"
        f"a bare collector, which only stores   {m['bare_spans_per_s']:12,.0f} spans/s   ours takes "
        f"{m['of_bare']:.2f} of it   {m['bare_cpu_ns_per_span']:.0f} ns/span\n"
        f"a row a span, SQLite alone            {rows:12,.0f} spans/s   {spans / rows:.1f} times fewer\n"
        f"blocks of a batch with an fsync each  {disk:12,.0f} MB/s      of which {stored / disk:.2f} is stored"
    )
    if "mlflow_metrics_per_s" in m:
        rate = m["mlflow_metrics_per_s"]
        print(f"MLflow's log-batch                    {rate:12,.0f} metrics/s {spans / rate:.0f} times fewer")
    else:
        print("MLflow's log-batch was not compared: there is no `mlflow` command (pip install mlflow)")
    if options.json:
        options.json.write_text(json.dumps(m, indent=2) + "\n")


if __name__ == "__main__":
    main()
