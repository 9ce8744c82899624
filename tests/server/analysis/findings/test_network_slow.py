"""Finding `network-slow`: a link that slows down, and everything that only looks like it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from ddpobs_server.analysis.finding import Finding, NotJudged
from ddpobs_server.analysis.findings.network_slow import NetworkSlowFacts, network_slow

from tests.support.analysis.judged import facts_of, only
from tests.support.analysis.link_scenario import Run, on_hosts

facts = partial(facts_of, NetworkSlowFacts)

MB = 10**6
STEPS = 200
TWO_HOSTS = on_hosts(2, hosts=2)


def slow_between(first: int, end: int, factor: float = 3.0, **changes: Any) -> Run:
    slower = np.exp(np.random.default_rng(0).normal(0, 0.05, STEPS))
    slower[first:end] *= factor
    fields: dict[str, Any] = {"sizes": [MB, 2 * MB], "ready_ms": [10.0, 20.0], "steps": STEPS, "slower": slower}
    return Run(**fields | changes)


def test_a_link_that_slows_down_is_named_with_its_interval_and_bandwidth() -> None:
    finding = only(network_slow(slow_between(100, 160).evidence(**TWO_HOSTS)))
    assert finding.steps[0] == pytest.approx(100, abs=8)
    assert finding.steps[1] == pytest.approx(159, abs=8)
    assert facts(finding).ratio == pytest.approx(3.0, rel=0.1)
    assert facts(finding).bytes_per_s == pytest.approx(facts(finding).earlier_bytes_per_s / 3, rel=0.1)
    assert finding.severity == "critical"
    assert "instead of 0.12" in finding.title


def test_the_gain_is_the_time_that_the_slow_steps_lose() -> None:
    run = slow_between(100, 200)
    finding = only(network_slow(run.evidence(**TWO_HOSTS)))
    step_ns = run.evidence().joined.step_ns
    assert finding.gain is not None
    assert finding.gain.step_ns == pytest.approx(np.median(step_ns[110:]) - np.median(step_ns[:90]), rel=0.05)


def test_slow_transfers_that_backward_hides_lose_nothing() -> None:
    run = slow_between(100, 160, factor=2.0, sizes=[1_250_000, 400], ready_ms=[10.0, 40.0])
    finding = only(network_slow(run.evidence(**TWO_HOSTS)))
    assert (finding.severity, finding.gain) == ("info", None)


@pytest.mark.parametrize("seed", range(10))
def test_a_noisy_link_of_constant_speed_is_no_finding(seed: int) -> None:
    slower = np.exp(np.random.default_rng(seed).normal(0, 0.5, STEPS))
    assert network_slow(slow_between(0, 0, slower=slower).evidence(**TWO_HOSTS)) == []


@pytest.mark.parametrize("seed", range(10))
def test_transfers_that_wait_for_a_processor_in_most_steps_are_no_slow_link(seed: int) -> None:
    slower = np.ones(STEPS)
    random = np.random.default_rng(seed)
    slower[100:] += (random.random(100) < 0.8) * random.exponential(4.0, 100)
    judgement = network_slow(slow_between(0, 0, slower=slower).evidence(**TWO_HOSTS))
    assert [result for result in judgement if isinstance(result, Finding)] == []


def test_a_slow_rank_is_no_slow_link() -> None:
    late = np.zeros((STEPS, 2))
    late[100:, 1] = 60.0
    assert network_slow(slow_between(0, 0, late_ms=late).evidence(**TWO_HOSTS)) == []


def test_a_link_is_not_blamed_if_the_computation_slowed_down_as_well() -> None:
    late = np.zeros((STEPS, 2))
    late[100:160] = 10.0
    (result,) = network_slow(slow_between(100, 160, late_ms=late).evidence(**TWO_HOSTS))
    assert isinstance(result, NotJudged)
    assert "so did the computation of ranks 0 and 1" in str(result)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [(on_hosts(2), "on one host"), (TWO_HOSTS | {"absences": {"silent": [2]}}, "may have arrived later")],
)
def test_a_network_that_cannot_be_the_cause_is_not_blamed(facts: dict[str, Any], reason: str) -> None:
    (result,) = network_slow(slow_between(100, 160).evidence(**facts))
    assert isinstance(result, NotJudged)
    assert reason in str(result)


def test_more_bytes_take_longer_on_the_same_link() -> None:
    """The first steps moved a part of the buckets, as with unused parameters."""
    run = slow_between(0, 0)
    evidence = run.evidence(**TWO_HOSTS)
    first: Any = evidence.columns
    slow = slow_between(100, 200).evidence(**TWO_HOSTS)
    rank, spans = first.spans([0, 1], 0, STEPS)
    cut = (spans.step >= 100) | (spans.bucket == 0)

    class Fewer:
        layouts = first.layouts
        comms = first.comms

        def spans(self, ranks: list[int], begin: int, last: int) -> Any:
            rows = cut & np.isin(rank, ranks) & (spans.step >= begin) & (spans.step <= last)
            return rank[rows], spans.select(rows)

    fewer: Any = Fewer()
    assert network_slow(replace(slow, columns=fewer)) == []


def test_few_steps_and_single_ranks_have_no_past_to_compare() -> None:
    assert network_slow(Run([MB], [1.0], steps=30).evidence()) == []
    assert network_slow(Run([MB], [1.0], ranks=1).evidence()) == []
