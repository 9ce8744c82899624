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
from tests.support.server.batches import MS, batch, get, put, spans, steps

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


OF_ALL, OF_TWO = {"group_ranks": 4}, {"group_ranks": 2}


@pytest.mark.parametrize(
    ("groups", "pipeline", "own_ms", "slow"),
    [
        ([OF_TWO | {"group_first": rank % 2} for rank in range(4)], False, [60, 90, 60, 90], []),
        ([OF_TWO | {"group_first": rank // 2 * 2} for rank in range(4)], True, [60, 60, 90, 90], []),
        ([OF_ALL] * 4, False, [60, 60, 60, 90], [[3]]),
        ([OF_TWO] * 4, False, [60, 60, 60, 90], []),
    ],
    ids=["sharded", "pipeline", "world", "not known"],
)
def test_an_import_compares_the_ranks_that_the_exported_run_compares(
    tmp_path: Path, groups: list[dict[str, wire.Scalar]], pipeline: bool, own_ms: list[int], slow: list[list[int]]
) -> None:
    file, said = tmp_path / "steps.parquet", {}
    with collector(tmp_path) as running:
        for rank, settings in enumerate(groups):
            hello = wire.Hello(host="node", pid=7, device="cpu", backend="gloo", versions={}, settings=settings)
            own = {"own_ns": own_ms[rank] * MS, "own_backward_ns": (own_ms[rank] - 50) * MS}
            held: dict[str, wire.Scalar] = {"stages": 2, "held": str(rank // 2), "micro_batches": 4}
            events = [wire.Event(kind="pipeline", at_ns=0, detail=held | {"schedule": "ScheduleGPipe"})] * pipeline
            sent = batch("live", rank=rank, hello=hello, world_size=4, steps=steps(0, 60, **own), events=events)
            assert put(running.url, sent).is_success
        for command in (["export", "live", "-o", str(file)], ["import", str(file), "--run", "again"]):
            done = CliRunner().invoke(main, [*command, "--collector", running.url])
            assert done.exit_code == 0, done.output
        for run in ("live", "again"):
            ranks = get(running.url, f"/runs/{run}/ranks")["ranks"]
            findings = get(running.url, f"/runs/{run}/diagnostics")["findings"]
            said[run] = (
                [finding["ranks"] for finding in findings if finding["code"] == "straggler"],
                [(one["group_ranks"], one["group_first"]) for one in ranks],
                get(running.url, f"/runs/{run}/pipeline")["pipeline"],
            )
    assert said["live"][0] == said["again"][0] == slow
    assert said["again"][2] == said["live"][2]
    if "group_first" in groups[0]:
        assert said["again"][1] == said["live"][1] == [tuple(group.values()) for group in groups]
