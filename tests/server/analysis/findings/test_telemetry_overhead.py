"""The finding about the cost of telemetry, from accounts made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from ddpobs_server.analysis.finding import Finding, NotJudged
from ddpobs_server.analysis.findings.telemetry_overhead import TelemetryOverheadFacts, telemetry_overhead
from ddpobs_server.reports.account_json import own_cost_json

from ddpobs import wire
from ddpobs.shared.words import own_cost_text
from tests.support.analysis.accounts import process
from tests.support.analysis.failures import evidence
from tests.support.analysis.judged import facts_of, only


def judge(*costs: tuple[float, float, float] | None, **account: Any) -> list[Finding | NotJudged]:
    return list(telemetry_overhead(evidence(processes=processes(*costs, **account))))


def processes(*costs: tuple[float, float, float] | None, **account: Any) -> list[Any]:
    return [process(rank, telemetry=cost and measured(*cost), **account) for rank, cost in enumerate(costs)]


def measured(ratio: float, low: float, high: float) -> wire.TelemetryCost:
    return wire.TelemetryCost(ratio=ratio, low=low, high=high, pairs=40)


def test_a_cost_whose_whole_interval_is_above_one_percent_is_reported() -> None:
    finding = only(judge(None, (1.02, 1.011, 1.029)))
    assert finding.verdict == "Telemetry adds 2.0 % to a step"
    assert finding.measure == "1.1 % to 2.9 %, from 40 rests of telemetry"
    assert finding.cause.startswith("not known")
    facts = facts_of(TelemetryOverheadFacts, finding)
    assert [facts.cost_ratio, facts.low_ratio, facts.high_ratio] == pytest.approx([0.02, 0.011, 0.029])
    assert facts.rests == 40


@pytest.mark.parametrize("cost", [(1.02, 1.009, 1.031), (1.0, 0.99, 1.01), (0.98, 0.97, 0.99)])
def test_a_cost_that_may_be_below_one_percent_is_none(cost: tuple[float, float, float]) -> None:
    assert judge(cost, cost) == []


def test_too_few_rests_are_not_judged_and_a_run_that_never_rests_is_not_asked() -> None:
    (unjudged,) = judge(None, None, outside={"resting": 3})
    assert isinstance(unjudged, NotJudged)
    assert judge(None, None) == []


def test_the_cost_is_that_of_the_first_rank_that_measured_it() -> None:
    cost = own_cost_json(processes(None, (1.006, 1.003, 1.009), (1.5, 1.4, 1.6)))
    assert cost is not None
    assert cost["rank"] == 1
    assert own_cost_text(cost) == "telemetry adds 0.6 % (0.3 to 0.9 %) to a step; from 40 rests"
    assert own_cost_json(processes(None)) is None
