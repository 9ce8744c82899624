"""The truth set of the diagnosis: its verdicts and its tables."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.diagnosis.cases import CASES, Expected
from benchmarks.diagnosis.judge import compared
from benchmarks.diagnosis.tables import is_right, table
from benchmarks.diagnosis.training import Fault

FOUND: dict[str, Any] = {
    "code": "straggler",
    "severity": "warning",
    "ranks": [1],
    "phase": "backward",
    "parameters": ["layers.3.weight"],
    "intervals": [{"from": 61, "to": 118}],
    "evidence": {"cause": "own-work", "kind": "persistent", "phase_excess_ns": {"backward": 11.0, "other": 2.0}},
}
INJECTED = {"work_ns": 10.0, "delay_ns": 12.0, "typical_ns": 100.0}


def expected(**changes: Any) -> Expected:
    facts: dict[str, Any] = {"phase": "backward", "layer": 3, "cause": "own-work", "interval": (60, 119)}
    return Expected("straggler", (1,), **facts | changes)


def result(fault: dict[str, Any], share: float | None = 0.1, alarm: bool = False) -> dict[str, Any]:
    twin = [FOUND] if alarm else []
    parts = {"fault": {"other_alarms": []} | fault, "twin": twin, "disturbance": {"fault": 0.3, "twin": 0.05}}
    return {"case": "backward 10%", "share": share, "background": "none"} | parts


def test_a_right_finding_is_right_in_every_column() -> None:
    answer = compared(FOUND, expected(), INJECTED)
    assert answer.pop("stated_ratio") == pytest.approx(1.1)
    assert set(answer) == {"named", "phase", "bucket", "cause", "interval"}
    assert all(answer.values())


@pytest.mark.parametrize(
    ("column", "changes"),
    [
        ("phase", {"phase": "data"}),
        ("bucket", {"layer": 2}),
        ("cause", {"cause": "paging"}),
        ("interval", {"interval": (40, 119)}),
    ],
)
def test_a_wrong_column_is_wrong_alone(column: str, changes: dict[str, Any]) -> None:
    answer = compared(FOUND, expected(**changes), INJECTED)
    assert [name for name, value in answer.items() if value is False] == [column]


def test_a_finding_of_another_phase_is_not_right() -> None:
    assert is_right(result({"named": True, "phase": True, "cause": False}))
    assert not is_right(result({"named": True, "phase": False}))
    assert not is_right(result({"named": True, "cause": False}, share=None))


def test_the_tables_count_what_is_right_and_what_is_a_false_alarm() -> None:
    text = table(
        [
            result({"named": True, "phase": True, "stated_ratio": 1.05}),
            result({"named": False}, alarm=True),
            result({"named": True, "phase": True}, share=0.2) | {"case": "backward 20%"},
            result({"named": True, "phase": True, "steps_until_named": 40}, share=0.05) | {"case": "backward 5%"},
        ]
    )
    assert "| backward 10 % and more | 3 | 2 | not named 1 |" in text
    assert "| backward 5% | 1 | 1 |" in text
    assert "| all | 10 % and more | 3 | 2 (67%) | 1 of 1 |" in text
    assert "| disturbed 0% to 10% | 4 | 1 | straggler (own-work) 1 | 0 |" in text


@pytest.mark.parametrize("case", CASES)
def test_each_case_draws_the_same_run_again(case: str) -> None:
    assert CASES[case](random.Random(3)) == CASES[case](random.Random(3))


def test_a_fault_holds_in_its_steps() -> None:
    fault = Fault(0, "data", 0.1, first=4, last=8, every=2)
    assert [step for step in range(12) if fault.holds(step)] == [4, 6, 8]
