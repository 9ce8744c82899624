"""Errors about single runs: which are contained, and for how long a run counts as faulty."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from ddpobs_server.store import UnavailableError
from ddpobs_server.web.run_faults import RunFaults


def names(runs: Sequence[str]) -> list[str]:
    if {"c", "f"} & set(runs):
        raise ValueError("a damaged row")
    return list(runs)


def unavailable(_: Sequence[str]) -> None:
    raise UnavailableError("away", full=False)


def test_reading_apart_leaves_out_only_the_runs_that_fail() -> None:
    faults = RunFaults()
    parts = faults.apart("list", "abcdefgh", names)
    assert [run for part in parts for run in part] == list("abdegh")
    assert faults.recent("list") == ["c", "f"]
    assert faults.recent("metrics") == []
    assert faults.runs() == 2


def test_a_fault_is_over_once_its_run_is_read_again_or_after_ten_minutes() -> None:
    now_s = [0.0]
    faults = RunFaults(now_s=lambda: now_s[0])
    faults.apart("list", "cf", names)
    faults.apart("list", "c", lambda runs: runs)
    assert faults.runs() == 1
    now_s[0] = 61
    assert (faults.recent("list"), faults.runs()) == ([], 1)
    now_s[0] = 601
    assert faults.runs() == 0


def test_a_database_that_is_away_is_nobodys_fault() -> None:
    faults = RunFaults()
    with pytest.raises(UnavailableError), faults.contained("diagnosis", "run"):
        raise UnavailableError("away", full=False)
    with pytest.raises(UnavailableError):
        faults.apart("list", "ab", unavailable)
    assert faults.runs() == 0
