"""`ddpobs export`: what a client chose reaches the Parquet file as it was sent."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from benchmarks.rig.collector import collector
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
