"""The `ddpobs trace` command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cli import answering, ddpobs, invoke
from tests.support.integration.collectors import Reply, collector

STEP = {"name": "step 7", "args": {"step": 7}}


def test_trace_without_steps_is_about_the_slowest_step_after_the_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bins = {"first": [0, 64], "last": [63, 90], "wall_max_ns": [90, 70]}
    steps = {"step": [5, 6, 7, 8], "wall_ns": [1, 5, 9, 2]}
    answers = {
        "/runs/r/steps?mean=true&points=1000": {"columns": bins},
        "/runs/r/steps?mean=true&from=5&to=63": {"columns": steps},
        "/runs/r/trace?from=2&to=12": {"traceEvents": [STEP]},
    }
    with collector(answering(answers)) as server:
        done = invoke("trace", "r", "--collector", server.url)
    assert "steps 7 to 7, around the slowest one, 7." in done.stderr
    assert json.loads((tmp_path / "r-7-7.json").read_text()) == {"traceEvents": [STEP]}


def test_trace_of_a_wide_run_begins_at_the_slowest_step(tmp_path: Path) -> None:
    answers = {
        "/runs/r/steps?mean=true&points=1000": {"columns": {"first": [0], "last": [9], "wall_max_ns": [9]}},
        "/runs/r/steps?mean=true&from=0&to=9": {"columns": {"step": [0, 1], "wall_ns": [1, 9]}},
        "/runs/r/trace?from=1": {"traceEvents": [STEP]},
    }

    def reply(path: str) -> Reply:
        return answering(answers)(path) if path.removeprefix("/api/v1") in answers else (422, {}, b"{}")

    with collector(reply) as server:
        done = invoke("trace", "r", "-o", str(tmp_path / "t"), "--collector", server.url)
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "t").read_text()) == {"traceEvents": [STEP]}


def test_trace_saves_the_collectors_document(tmp_path: Path) -> None:
    with collector(lambda path: (200, {}, json.dumps({"traceEvents": [{"name": path}]}).encode())) as server:
        completed = ddpobs("trace", "r", "--steps", "2:5", "-o", str(tmp_path / "t"), "--collector", server.url)
    assert completed.returncode == 0, completed.stderr
    assert json.loads((tmp_path / "t").read_text()) == {"traceEvents": [{"name": "/api/v1/runs/r/trace?from=2&to=5"}]}


def test_trace_saves_no_file_without_steps(tmp_path: Path) -> None:
    with collector(lambda path: (200, {}, b'{"traceEvents": []}')) as server:
        for steps, code, message in ("20:10", 2, "A up to B"), ("20:30", 1, "none of the steps 20 to 30"):
            completed = ddpobs("trace", "r", "--steps", steps, "-o", str(tmp_path / "t"), "--collector", server.url)
            assert completed.returncode == code
            assert message in completed.stderr
    assert not (tmp_path / "t").exists()


def test_a_trace_that_cannot_be_written_is_reported_in_a_line(tmp_path: Path) -> None:
    with collector(lambda path: (200, {}, json.dumps({"traceEvents": [STEP]}).encode())) as server:
        completed = ddpobs(
            "trace", "r", "--steps", "2:5", "-o", str(tmp_path / "none" / "t"), "--collector", server.url
        )
    assert (completed.returncode, completed.stderr) == (
        1,
        f"ddpobs: {tmp_path / 'none' / 't'}: No such file or directory\n",
    )
