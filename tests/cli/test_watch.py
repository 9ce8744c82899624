"""`ddpobs watch` against small HTTP servers."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from ddpobs.cli import watch as watching
from tests.support.cli import invoke
from tests.support.integration.collectors import Reply, collector


@pytest.mark.parametrize(("end", "code"), [("finished", 0), ("failed", 3), ("lost", 3)])
def test_watch_prints_each_change_and_ends_with_the_run(end: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpobs.cli.watch.time.sleep", lambda _: None)
    states = [("running", 3), ("running", 3), ("running", 3), (end, 5)]

    def reply(path: str) -> Reply:
        answers: dict[str, object] = {
            "/api/v1/runs/r/ranks": {
                "ranks": [{"rank": 0, "phases_ns": {"forward": 1_000_000, "backward": 2_500_000}}]
            },
            "/api/v1/runs/r/diagnostics": {"findings": [{"code": "straggler", "verdict": "slow\n"}], "summary": ""},
        }
        if path not in answers:
            state, steps = states.pop(0)
            answers[path] = {"run": "r", "state": state, "steps": steps}
        return 200, {}, json.dumps(answers[path]).encode()

    with collector(reply) as server:
        done = invoke("watch", "r", "--collector", server.url)
    first, last = done.stdout.splitlines()
    assert (done.exit_code, first) == (code, "r: running, step 3, 3.5 ms a step: slow\\n")
    assert last == f"r: {end}, step 5, 3.5 ms a step: slow\\n"


def test_watch_waits_for_a_run_that_has_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("ddpobs.cli.watch.time.sleep", pauses.append)

    def reply(path: str) -> Reply:
        if not pauses:
            return 404, {}, b'{"title": "No such run", "detail": "r"}'
        answers: dict[str, Any] = {
            "ranks": {"ranks": []},
            "diagnostics": {"findings": [{"code": "scaling-loss"}], "summary": "Too short."},
        }
        finished = {"run": "r", "state": "finished", "steps": 7}
        return 200, {}, json.dumps(answers.get(path.rsplit("/", 1)[-1], finished)).encode()

    with collector(reply) as server:
        done = invoke("watch", "r", "--collector", server.url)
    assert done.stderr == f"ddpobs: waiting for run r, which has not reported to {server.url} yet\n"
    assert (done.exit_code, done.stdout) == (0, "r: finished, step 7: Too short.\n")


def test_a_narrow_terminal_shows_the_own_time_alone() -> None:
    rank = {"rank": 0, "host": "vm", "state": "running", "last_step": 3, "pulse": None, "own_ns": 2_500_000}
    rank["phases_ns"] = {"forward": 1_000_000, "backward": 1_500_000}
    diagnosis: Any = {"findings": [], "summary": "Balanced."}
    look = watching._Look().refreshed({"run": "r", "state": "running", "steps": 3}, [rank], diagnosis)
    for columns, shown in (80, False), (140, True):
        console = Console(width=columns, record=True, file=io.StringIO())
        console.print(look.screen(columns))
        text = console.export_text()
        assert ("backward ms" in text) == shown
        assert "2.5" in text
        assert "Balanced." in text


def test_watch_shows_the_parts_of_the_worst_finding_and_the_verdicts_of_the_next_ones() -> None:
    findings: list[dict[str, Any]] = [
        {"severity": "critical", "verdict": "Rank 3 is [slow]", "cause": "its host", "remedy": "Look.", "gain": None},
        {"severity": "info", "verdict": "Data is late", "remedy": "Add workers.", "gain": None},
    ]
    diagnosis: Any = {"findings": [{"code": "input-bound"} | finding for finding in findings], "summary": ""}
    look = watching._Look().refreshed({"run": "r", "state": "running", "steps": 3}, [], diagnosis)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(look.screen(100))
    shown = [line.rstrip() for line in console.export_text().splitlines()]
    assert shown[-4:] == [
        "critical: Rank 3 is [slow]",
        "  cause   its host",
        "  do      Look.",
        "info: Data is late",
    ]
