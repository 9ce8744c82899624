"""Parquet files: operations of StragglerAnalysis, and files that are no traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddpobs.errors import TraceFileError
from ddpobs.imports import parquet, straggler_analysis
from ddpobs.imports.files import encoded, read
from ddpobs.imports.traced_run import TracedRun
from ddpobs.wire.facts import PipelineFacts, facts_of
from tests.support.smoke import run as printed
from tests.support.straggler_operations import STEPS, operations, write


@pytest.mark.parametrize("slow", [(0, 0), (1, 1)])
def test_the_slow_worker_of_a_pipeline_is_named(tmp_path: Path, slow: tuple[int, int]) -> None:
    run = read([write(tmp_path / "trace.parquet", operations(slow))], "r")
    assert isinstance(run, TracedRun)
    rank = 2 * slow[0] + slow[1]
    late = f"rank {rank} arrived last in {STEPS - 1} of {STEPS - 1} steps: 300 ms after the others (median)"
    assert run.lines == [f"{STEPS} steps of ranks 0, 1, 2 and 3", f"{late}, most of it in backward"]
    batches = [batch for batch, _ in encoded(run)]
    stages = [facts_of(event, PipelineFacts) for batch in batches for event in batch.events if event.kind == "pipeline"]
    assert [(stage.held, stage.stages, stage.first_rank) for stage in stages] == [
        ("0", 2, 0),
        ("1", 2, 0),
        ("0", 2, 2),
        ("1", 2, 2),
    ]


def test_waits_for_messages_are_no_own_time(tmp_path: Path) -> None:
    run = read([write(tmp_path / "trace.parquet", operations((0, 0)))], "r")
    assert isinstance(run, TracedRun)
    own_ms = [(steps.own_ns[1:] // 10**6).tolist() for steps in run.steps]
    assert own_ms[1] == own_ms[2] == own_ms[3]  # Each waits 200 ms for a message.
    assert own_ms[0] == [own + 300 for own in own_ms[1]]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"start_ts": float("nan")}, "times below 1,000,000 s"),
        ({"duration": 1e30}, "times below 1,000,000 s"),
        ({"optype": "forward-compute"}, "a step that reduces gradients"),
        ({"stage": "first"}, "numbers in all columns but optype"),
        ({"step": float("inf")}, "numbers in all columns but optype"),
        ({"rank": [0]}, "a whole Parquet file of numbers and texts"),
    ],
)
def test_times_that_are_none_are_refused(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    rows = [row | change for row in operations((0, 0))]
    with pytest.raises(TraceFileError, match=expected):
        read([write(tmp_path / "trace.parquet", rows)], "r")


def test_files_that_are_not_whole_or_too_large_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write(tmp_path / "whole.parquet", operations((0, 0)))
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(whole.read_bytes()[:-20])
    other = write(tmp_path / "other.parquet", [{"a": 1}])
    with pytest.raises(TraceFileError, match="a whole Parquet file"):
        read([cut], "r")
    with pytest.raises(TraceFileError, match="a list of events"):
        read([other], "r")
    monkeypatch.setattr(parquet, "_MAX_CELLS", 100)
    with pytest.raises(TraceFileError, match="at most 100 cells"):
        straggler_analysis.read(whole)


@pytest.mark.wide
def test_the_cost_of_the_slow_worker_is_compared_with_the_published_one(tmp_path: Path) -> None:
    """A slow backward of 500 ms beside three of 200 ms: 1.1 s in place of two forwards and backwards of the mean."""
    write(tmp_path / "trace-AB.parquet", operations((0, 0)))
    published = 1.1 / (2 * (0.2 + 0.275))
    (tmp_path / "result-AB.json").write_text(json.dumps({"blocking_slowdown": published}))
    row = printed("slowdown", str(tmp_path)).strip().splitlines()[-1]
    assert [cell.strip() for cell in row.strip("|").split("|")] == ["AB", "1.1579", "1.1579", "+0.00%"]
