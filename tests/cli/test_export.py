"""`ddpobs export`: what a client chose reaches the Parquet file as it was sent."""

from __future__ import annotations

from pathlib import Path

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from benchmarks.rig.collector import collector
from benchmarks.rig.training import ROOT
from ddpobs import wire
from ddpobs.cli import main
from ddpobs.imports import exported, parquet
from tests.support.server.batches import batch, put, spans, steps

RUN = "-1.e9_--rows"
"""Looks like an option and like a number."""
FORMULA = "=cmd|' /C calc'!A0"
HOSTILE = f'{FORMULA}\0\n\r\u202egpj.exe\u2028"\\,;\x1b[31m\ud7ff\U0001f600'
"""A formula, a null byte, line ends, text from right to left, quotes, and colours of a terminal."""


@pytest.mark.parametrize("rows", ["steps", "spans"])
def test_hostile_texts_are_exported_and_read_back_as_they_were_sent(tmp_path: Path, rows: str) -> None:
    hello = wire.Hello(host=HOSTILE, pid=7, device=f"{HOSTILE}d", backend=f"{HOSTILE}b", versions={})
    parameter = wire.Parameter(name=f"{HOSTILE}p", size=250)
    bucket = wire.Bucket(size_bytes=1000, dtype="float32", parameters=[parameter])
    layout = wire.Layout(module=0, name=f"{HOSTILE}m", revision=0, comm=f"{HOSTILE}c", buckets=[bucket, bucket])
    file = tmp_path / f"{rows}.parquet"
    sent = batch(RUN, hello=hello, layouts=[layout], world_size=1, steps=steps(0, 4), spans=spans(0, 4))
    with collector(tmp_path) as running:
        assert put(running.url, sent).status_code == 201
        done = CliRunner().invoke(
            main, ["export", "-o", str(file), "--rows", rows, "--collector", running.url, "--", RUN]
        )
        assert done.exit_code == 0, done.output
    table = pq.read_table(file)
    assert table.column("run").to_pylist() == [RUN] * len(table)
    assert table.column("step").to_pylist() == [step for step in range(4) for _ in range(1 + (rows == "spans"))]
    if rows == "steps":
        (trace,), _ = exported.read([file])
        assert (trace.host, trace.device, trace.backend) == (hello.host, hello.device, hello.backend)
        (read,) = exported._facts(parquet.read(file, [])).layouts
        assert wire.pack_json(read) == wire.pack_json(layout)


def test_the_query_of_the_examples_finds_the_slow_host_of_several_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    own_ms, count = {"node0": 60, "node1": 60, "node2": 80}, 36
    with collector(tmp_path) as running:
        for run in ("first", "second"):
            for rank, (host, own) in enumerate(own_ms.items()):
                hello = wire.Hello(host=host, pid=7, device="cpu", backend="gloo", versions={})
                rows = steps(0, count, own_ns=np.array([wire.UNKNOWN, *[own * 10**6] * (count - 1)]))
                assert put(running.url, batch(run, rank=rank, hello=hello, world_size=3, steps=rows)).is_success
            exported_to = ["-o", f"runs/{run}.parquet", "--collector", running.url]
            done = CliRunner().invoke(main, ["export", run, *exported_to])
            assert done.exit_code == 0, done.output
    answer = duckdb.sql((ROOT / "examples" / "slow_hosts.sql").read_text())
    assert answer is not None
    found = [(host, runs, hours, late) for _, host, runs, hours, late in answer.fetchall()]
    expected = {host: (own - 60) / 100 * (count - 1) / count for host, own in own_ms.items()}
    assert found[0][0] == "node2"
    for host, runs, hours, late in found:
        assert (runs, hours) == (2, pytest.approx(2 * count * 0.1 / 3600))
        assert late == pytest.approx(expected.pop(host))
    assert expected == {}
