"""The finding about wall time outside of steps, from accounts made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from ddpobs_server.analysis.account.rank_account import Process
from ddpobs_server.analysis.account.run_account import Launch, account_of
from ddpobs_server.analysis.finding import Finding, NotJudged
from ddpobs_server.analysis.findings.time_outside_steps import time_outside_steps

from ddpobs import wire
from tests.support.analysis.accounts import S, phases, process
from tests.support.analysis.failures import evidence
from tests.support.analysis.judged import only


def judge(*processes: Process, size: int = 2) -> list[Finding | NotJudged]:
    account = account_of([Launch("a", 0, size, processes)])
    return list(time_outside_steps(evidence(account=account, processes=processes)))


def steps(seconds: int, exposed: int = 0, count: int = 50) -> dict[str, Any]:
    return {"phases_ns": phases(backward=seconds, exposed_comm=exposed), "steps": count}


def test_the_rank_that_saves_is_named_and_the_other_waits() -> None:
    interval = wire.OutsideInterval(4, 200, 10 * S, 90 * S, 70 * S)
    checkpoints = wire.Outside(kind="checkpoint", total_ns=70 * S, count=9, intervals=[interval])
    saves, waits = process(0, outside=[checkpoints], **steps(20)), process(1, outside={"waiting": 70}, **steps(20))
    finding = only(judge(saves, waits))
    assert finding.verdict == "Rank 0 saves checkpoints for 70 % of the run"
    assert finding.measure == "70 s of 100 s while the other rank waits; steps take 20 %"
    assert (finding.severity, finding.ranks, finding.steps) == ("critical", [0], (4, 200))
    assert [(each.first, each.last) for each in finding.intervals] == [(4, 200)]
    assert "in the background" in finding.remedy
    assert finding.gain is not None
    assert finding.gain.whole == "run"
    assert finding.gain.ratio == pytest.approx(0.7)


def test_an_evaluation_of_all_ranks_is_named() -> None:
    finding = only(judge(*(process(rank, outside={"evaluation": 80}, **steps(8)) for rank in range(2))))
    assert "All ranks evaluate for 80 % of the run" in finding.title
    assert finding.ranks == [0, 1]


def test_a_run_that_trains_most_of_the_time_has_no_finding() -> None:
    assert judge(*(process(rank, outside={"evaluation": 5}, **steps(83)) for rank in range(2))) == []


def test_a_start_of_less_than_a_minute_does_not_count() -> None:
    assert judge(*(process(rank, until_s=30, **steps(20)) for rank in range(2))) == []
    slow: dict[str, Any] = {"imported_ns": 5 * S, "ready_ns": 400 * S, "until_s": 500}
    finding = only(judge(*(process(rank, **slow, **steps(100)) for rank in range(2))))
    assert "All ranks start up for 80 % of the run" in finding.title


def test_few_steps_and_absent_accounts_are_not_judged_with_the_reason() -> None:
    (few,) = judge(*(process(rank, outside={"evaluation": 80}, **steps(8, count=3)) for rank in range(2)))
    assert str(few) == "time-outside-steps: fewer than 20 steps"
    absent = Process(1, None, reason="no batch has arrived from it")
    results = judge(process(0, **steps(83)), absent)
    assert "not known for rank 1, because no batch has arrived from it" in str(results[0])


@pytest.mark.parametrize("place", ["barrier at train.py:31 prepare", ""])
def test_a_rank_that_starts_up_is_named_and_the_other_waits_with_its_place(place: str) -> None:
    known: dict[str, Any] = {"until_s": 500, "prepare_ns": 390 * S, **steps(100)}
    waits = process(1, **known, prepare_wait_ns=380 * S, start_wait_place=place)
    finding = only(judge(process(0, **known), waits))
    assert (finding.ranks, finding.verdict) == ([0], "Rank 0 starts up for 80 % of the run")
    assert f" while the other rank waits{f' ({place})' * bool(place)}; " in finding.measure
    assert "once, before the job" in finding.remedy


def test_a_short_wait_in_the_start_does_not_count() -> None:
    known: dict[str, Any] = {"until_s": 100, "prepare_ns": 30 * S, **steps(60)}
    assert judge(process(0, **known), process(1, **known, prepare_wait_ns=29 * S)) == []


def test_restarts_are_nobodys_work() -> None:
    late: dict[str, Any] = dict.fromkeys(("started_ns", "imported_ns", "ready_ns"), 150 * S)
    first = Launch("a", 0, 2, [process(rank, checkpoint_step=50, **steps(90)) for rank in range(2)])
    second = Launch("b", 1, 2, [process(rank, until_s=250, **steps(90), **late) for rank in range(2)])
    account = account_of([first, second])
    finding = only(list(time_outside_steps(evidence(account=account))))
    share = account.share("restart")
    assert (finding.verdict, finding.ranks) == (
        f"Restarts and repeated steps take {share:.0%} of the run".replace("%", " %"),
        [0, 1],
    )
    assert finding.gain is not None
    assert finding.gain.ratio == pytest.approx(share, abs=0.001)
