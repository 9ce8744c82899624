"""Real trainings that spend their time outside of steps: the account and the finding show where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.launch import ranks_of
from benchmarks.rig import patience
from benchmarks.rig.training import PATIENT
from tests.support.server.batches import get

pytestmark = pytest.mark.wide

SCRIPT = Path(__file__).with_name("scripts") / "outside.py"
REPORTS = ("account", "diagnostics")


@pytest.mark.parametrize(
    ("kind", "part", "sentence", "rank"),
    [
        ("checkpoints", "checkpoint", "Rank 0 saves checkpoints for", 0),
        ("validation", "evaluation", "All ranks evaluate for", 0),
        ("barrier", "waiting", "Rank 1 waits at collectives for", 1),
    ],
)
def test_the_time_outside_of_steps_is_accounted_for(  # noqa: PLR0917 - the facts of one case
    kind: str, part: str, sentence: str, rank: int, url: str, tmp_path: Path
) -> None:
    run = f"outside-{kind}"
    with ranks_of(
        SCRIPT, kind, ranks=2, folder=tmp_path, environ={"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": run} | PATIENT
    ) as ranks:
        assert [process.wait(120) for process in ranks.processes] == [0, 0], ranks.logs()
    account = get(url, f"/runs/{run}/account")
    (attempt,) = account["attempts"]
    parts = {entry["rank"]: entry["parts_ns"] for entry in attempt["ranks"]}
    assert [sum(ns.values()) for ns in parts.values()] == [attempt["wall_ns"]] * 2
    assert parts[rank][part] >= 20 * 0.25e9 * 0.9
    assert account["goodput"] < 0.5
    findings = {finding["code"]: finding for finding in get(url, f"/runs/{run}/diagnostics")["findings"]}
    assert sentence in findings["time-outside-steps"]["verdict"]


def test_the_account_of_two_attempts_has_the_start_the_restart_and_the_repeated_steps(url: str, tmp_path: Path) -> None:
    environ = {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": "outside-restart"} | PATIENT
    for _ in range(2):
        with ranks_of(SCRIPT, "restart", ranks=2, folder=tmp_path, environ=environ) as ranks:
            ended = [process.wait(120) for process in ranks.processes]
    assert ended == [0, 0], ranks.logs()
    account = get(url, "/runs/outside-restart/account")
    first, second = account["attempts"]
    assert (first["steps"], first["repeated_steps"], second["steps"]) == (20, 10, 40)
    assert sum(part["rank_ns"] for part in account["parts"]) == account["rank_ns"] == 2 * account["wall_ns"]
    rank_ns = {part["part"]: part["rank_ns"] for part in account["parts"]}
    assert rank_ns["model"] >= 2 * 2 * 1.5e9
    assert rank_ns["repeated_steps"] > 0
    assert rank_ns["restart"] == 2 * (second["began_ns"] - first["until_ns"])


def test_a_training_under_the_name_of_one_that_ended_in_order_is_no_restart_of_it(url: str, tmp_path: Path) -> None:
    def train() -> dict[str, Any]:
        environ = {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": "outside-twice"} | PATIENT
        with ranks_of(SCRIPT, "steps", ranks=2, folder=tmp_path, environ=environ) as ranks:
            assert [process.wait(patience.HANG_S) for process in ranks.processes] == [0, 0], ranks.logs()
        return reports(url, get(url, "/runs/outside-twice/attempts")["attempts"][-1]["attempt"])

    def reports(url: str, attempt: str) -> dict[str, Any]:
        account, diagnosis = (get(url, f"/runs/outside-twice/{name}", attempt=attempt) for name in REPORTS)
        return {"account": account, "findings": diagnosis["findings"], "goodput": diagnosis["goodput"]}

    first, second = train(), train()
    assert reports(url, first["account"]["attempt"]) == first
    for training in (first, second):
        (attempt,) = training["account"]["attempts"]
        assert (attempt["attempt"], attempt["steps"]) == (training["account"]["attempt"], 40)
        assert "restart" not in {part["part"] for part in training["account"]["parts"]}
        assert training["goodput"] == attempt["goodput"]


def test_a_rank_that_waits_before_the_first_step_does_not_prepare(url: str, tmp_path: Path) -> None:
    environ = {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": "outside-prepare"} | PATIENT
    with ranks_of(SCRIPT, "prepare", ranks=2, folder=tmp_path, environ=environ) as ranks:
        assert [process.wait(patience.HANG_S) for process in ranks.processes] == [0, 0], ranks.logs()
    (attempt,) = get(url, "/runs/outside-prepare/account")["attempts"]
    parts = {entry["rank"]: entry["parts_ns"] for entry in attempt["ranks"]}
    assert parts[1]["start_waiting"] >= 1e9
    assert parts[0]["prepare"] >= 1.5e9
    assert parts[0].get("start_waiting", 0) < parts[1]["start_waiting"]
    assert [sum(ns.values()) for ns in parts.values()] == [attempt["wall_ns"]] * 2
