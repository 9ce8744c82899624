"""Imported runs send nothing: they are never lost, and nobody is alerted to what a file shows of the past."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ddpobs_server.metrics.scrape import RunRenderer
from ddpobs_server.operations.webhook_job import WebhookJob
from ddpobs_server.reports import judged_steps
from ddpobs_server.reports.reports import Reports
from ddpobs_server.reports.run_state import state_of_rank, state_of_run
from ddpobs_server.settings import Settings
from ddpobs_server.store import Arrival, Store
from prometheus_client import CollectorRegistry, generate_latest

from ddpobs import wire
from ddpobs.imports.files import encoded, read
from tests.support import inspector_logs, straggler_operations
from tests.support.profiler_traces import trace
from tests.support.server.batches import ATTEMPT, steps
from tests.support.server.http_receiver import http_receiver

AGO_NS = 100 * 10**9
"""Longer than a run may be silent before it is lost, and shorter than it may be before nobody looks at it."""


def dumps(folder: Path) -> list[Path]:
    """Dumps of a hang: rank 1 did not come to the ninth collective."""
    files = []
    for rank, number in enumerate((9, 8)):
        call = {"process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce", "collective_seq_id": number}
        files.append(folder / f"rank_{rank}")
        files[-1].write_text(json.dumps({"entries": [call | {"retired": rank == 1}]}))
    return files


def timeline(folder: Path) -> list[Path]:
    """Three reductions of one tensor by two ranks."""
    events: list[dict[str, Any]] = [{"name": "start_time_since_epoch_in_micros", "ph": "M", "args": {"micros": "1"}}]
    for at in (0, 10_000, 20_000):
        reduction = [("B", "NEGOTIATE_ALLREDUCE", 0), ("X", "0", 0), ("X", "1", 100), ("E", "", 100)]
        reduction += [("B", "ALLREDUCE", 100), ("E", "", 5000)]
        shape = {"dtype": "float32", "shape": "[8]"}
        events += [{"name": name, "ph": ph, "pid": 1, "ts": at + us, "args": shape} for ph, name, us in reduction]
    (folder / "timeline.json").write_text(json.dumps(events))
    return [folder / "timeline.json"]


def export(folder: Path, first: int = 0, count: int = 40) -> list[Path]:
    """Steps of two ranks."""
    table = steps(first, count).table
    columns = {name: np.tile(column, 2) for name, column in zip(wire.Steps.names, table, strict=True)}
    keys = {"run": ["live"] * 2 * count, "attempt": [ATTEMPT] * 2 * count, "rank": [0] * count + [1] * count}
    pq.write_table(pa.table({**keys, **columns}), folder / "steps.parquet")
    return [folder / "steps.parquet"]


FORMATS: dict[str, Callable[[Path], list[Path]]] = {
    "torch Flight Recorder": dumps,
    "ddpobs export": export,
    "StragglerAnalysis": lambda folder: [
        straggler_operations.write(folder / "trace.parquet", straggler_operations.operations((0, 0)))
    ],
    "NCCL Inspector": lambda folder: [
        inspector_logs.write(folder, rank, list(inspector_logs.lines(rank, 1))) for rank in range(2)
    ],
    "Horovod timeline": timeline,
    "torch.profiler": lambda folder: [trace(folder, f"{rank}.json", rank) for rank in range(2)],
}


def store_import(store: Store, file_format: str, folder: Path, *, whole: bool = True) -> None:
    """Store an import of some minutes ago; without `whole` it was cut off after its first batch."""
    batches = list(encoded(read(FORMATS[file_format](folder), "run")))
    assert {batch.hello.settings["imported"] for batch, _ in batches if batch.hello} == {file_format}
    for batch, _ in batches if whole else batches[:1]:
        body = wire.encode(batch)
        arrival = Arrival(wire.decode(body), hashlib.sha256(body).digest(), len(body), time.time_ns() - AGO_NS)
        store.ingest([arrival])


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("file_format", FORMATS)
def test_an_imported_run_has_the_state_of_its_files_however_long_ago(
    store: Store, tmp_path: Path, file_format: str, whole: bool
) -> None:
    store_import(store, file_format, tmp_path, whole=whole)
    run, settings, now_ns = store.run("run"), Settings(), time.time_ns()
    assert run is not None
    hangs = file_format == "torch Flight Recorder"
    assert state_of_run(run, settings, now_ns) == ("hung" if hangs else "finished")
    states = [state_of_rank(source, settings, now_ns) for source in store.sources("run", run.attempt)]
    assert states == (["hung", "running"] if hangs else ["finished"] * len(states))[: len(states)]
    reports = Reports(store)
    (attempt,) = reports.attempts(run)
    assert attempt.outcome == ("hung" if hangs else "finished")
    has_time_of_day = file_format == "NCCL Inspector"
    assert (attempt.began_ns is not None, attempt.ended_ns is not None) == (has_time_of_day,) * 2
    assert (attempt.ended_ns or 0) < run.last_seen_ns
    codes = [finding["code"] for finding in reports.diagnostics("run", run.attempt)["findings"]]
    assert "lost" not in codes
    assert ("hang" in codes) == hangs


@pytest.mark.parametrize("whole_rows", [judged_steps.WHOLE_ROWS, 1000], ids=["whole", "latest"])
def test_an_imported_run_has_all_steps_of_its_file(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_rows: int
) -> None:
    monkeypatch.setattr(judged_steps, "WHOLE_ROWS", whole_rows)
    for batch, _ in encoded(read(export(tmp_path, 500, 3000), "run")):
        body = wire.encode(batch)
        store.ingest([Arrival(wire.decode(body), hashlib.sha256(body).digest(), len(body), time.time_ns())])
    run = store.run("run")
    assert run is not None
    reports = Reports(store)
    (attempt,) = reports.attempts(run)
    assert run.steps == attempt.steps == reports.diagnostics("run", run.attempt)["steps_seen"] == 3000


@pytest.mark.parametrize("file_format", FORMATS)
def test_an_imported_run_has_no_series_and_no_messages(store: Store, tmp_path: Path, file_format: str) -> None:
    store_import(store, file_format, tmp_path)
    run = store.run("run")
    assert run is not None
    reports = Reports(store)
    reports.diagnostics("run", run.attempt)
    assert b'run="run"' not in RunRenderer(Settings(), store, reports).render("default", generate_latest).text
    with http_receiver() as receiver:
        webhook = Settings(webhook_url=receiver.url, webhook_after_s=0, webhook_severity="warning")
        job = WebhookJob(webhook, store, reports, CollectorRegistry())
        job.judge()
        job.send_due()
        assert receiver.requests == []
