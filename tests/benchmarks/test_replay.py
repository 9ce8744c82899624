"""The replay of kept runs: a change reaches every user of a constant, and costs the cases that need it."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddpobs_server.analysis.slow_ranks import recurrence, stretches, turns

from benchmarks.diagnosis.cases import Expected
from benchmarks.diagnosis.replay import (
    Change,
    Run,
    changed,
    constant_changes,
    detector_changes,
    load,
    outcome,
    save,
    scaled,
    table,
)
from tests.support.analysis.scenario import Slow, columns, evidence_of, noiseless, own_times

SLOW = Run(
    "slow",
    Expected("straggler", (1,), "data", kind="persistent"),
    evidence_of(*columns(own_times(120, 2, seed=0, slow=(Slow(1, "data"),)))),
)
BALANCED = Run("balanced", None, evidence_of(*columns(own_times(120, 2, seed=1))))


def test_saved_runs_are_judged_as_the_runs_themselves(tmp_path: Path) -> None:
    save(tmp_path / "runs.npz", [SLOW, BALANCED])
    runs = list(load(tmp_path / "runs.npz"))
    assert [(run.name, run.evidence.steps.own_ns.tolist()) for run in runs] == [
        (run.name, run.evidence.steps.own_ns.tolist()) for run in (SLOW, BALANCED)
    ]
    assert outcome(runs).won == {"slow"}
    assert not outcome(runs).false


def test_a_finding_about_another_rank_or_in_a_balanced_run_is_false() -> None:
    balanced, other = Run("b", None, SLOW.evidence), Run("o", Expected("straggler", (0,)), SLOW.evidence)
    found = outcome([balanced, other])
    assert not found.won
    assert {text.partition(":")[0] for text in found.false} == {"b", "o"}


def test_the_table_names_the_cases_that_a_change_loses_and_the_changes_without_effect() -> None:
    small = evidence_of(*columns(noiseless({1: ("forward", 5.0)}, steps=100, ranks=2)))
    changes = [change for change in detector_changes() if change.label in ("without steady", "without seldom")]
    lines = list(table([Run("small", Expected("straggler", (1,), "forward"), small)], iter(changes)))
    assert lines[0].startswith("As it is: 1 of 1 faults, 0 false findings in 1 runs.")
    assert lines[-2:] == ["| without steady | 1: small | 0 | 0 | 0 |", "\nWithout any effect: without seldom."]


def test_a_changed_constant_reaches_the_modules_that_import_it_and_no_other() -> None:
    users = (recurrence, stretches, turns)
    with changed(Change("half", recurrence, "MIN_COST_SHARE", 0.025)):
        assert [user.MIN_COST_SHARE for user in users] == [0.025] * 3
    assert [user.MIN_COST_SHARE for user in users] == [0.05] * 3
    with changed(Change("fewer", turns, "_MIN_LATE_SHARE", 0.5)):
        assert [turns._MIN_LATE_SHARE, stretches._MIN_LATE_SHARE] == [0.5, 0.85]


@pytest.mark.parametrize(
    ("value", "result"),
    [(0.5, 0.35), (10, 7), (1, 1), ((0.1, 20), (0.07, 14)), ({64: 0.2}, {64: 0.14}), ("text", None)],
)
def test_numbers_are_scaled_wherever_they_stand(value: object, result: object) -> None:
    assert scaled(value, 0.7) == pytest.approx(result)


def test_every_constant_is_moved_both_ways() -> None:
    labels = [change.label for change in constant_changes()]
    assert {"`recent._SUDDEN` -30 %", "`turns._MIN_MOVES` +30 %", "`extent._FEWER` -30 %"} <= set(labels)
    assert len(labels) == len(set(labels))
