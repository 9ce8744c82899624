"""Finding `bucket-order`: buckets that block others, and the predicted saving of another order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ddpobs_server.analysis.finding import Finding
from ddpobs_server.analysis.findings.bucket_order import bucket_order, late_buckets

from ddpobs import wire
from tests.support.analysis.judged import only
from tests.support.analysis.link_scenario import Run, on_hosts

MB = 10**6
FACTS = on_hosts(2, hosts=2)
REVERSED, ORDERED = [40.0, 30.0, 20.0, 10.0], [10.0, 20.0, 30.0, 40.0]


def run(ready_ms: list[float], **changes: Any) -> Run:
    """Four buckets that take 8.1 ms each."""
    defaults: dict[str, Any] = {"sizes": [MB] * 4}
    return Run(ready_ms=ready_ms, **defaults | changes)


def test_the_gain_is_what_the_run_in_the_order_of_arrival_saves() -> None:
    finding = only(bucket_order(run(REVERSED).evidence(**FACTS)))
    saved_ns = np.median(run(REVERSED).evidence().joined.step_ns) - np.median(run(ORDERED).evidence().joined.step_ns)
    assert finding.gain is not None
    assert finding.gain.step_ns == pytest.approx(saved_ns, rel=0.01)
    assert finding.gain.error_ratio < 0.01
    assert finding.severity == "critical"


def test_the_buckets_that_others_wait_for_are_named_with_their_parameters() -> None:
    finding = only(bucket_order(run(REVERSED).evidence(**FACTS)))
    assert (finding.buckets, finding.parameters) == ([0, 1, 2], ["p0", "p1", "p2"])
    assert (finding.measure, finding.where) == ("3 of 4 buckets wait for an earlier one", "bucket 0.0: p0")


@pytest.mark.parametrize("flag", [True, False])
def test_the_remedy_names_the_flag_that_keeps_the_order(flag: bool) -> None:
    finding = only(bucket_order(run(REVERSED).evidence(**FACTS, settings={"find_unused_parameters": flag})))
    assert ("switch it off" in finding.remedy) == flag


def test_buckets_in_the_order_of_arrival_are_no_finding() -> None:
    assert bucket_order(run(ORDERED).evidence(**FACTS)) == []


def test_another_order_without_a_saving_is_no_finding() -> None:
    assert bucket_order(run([10.0, 20.0, 40.0, 39.9]).evidence(**FACTS)) == []


@pytest.mark.parametrize("changes", [{"ranks": 1}, {"sizes": [4] * 4, "alpha_ms": 0.001}])
def test_without_exposed_communication_no_order_matters(changes: dict[str, Any]) -> None:
    assert bucket_order(run(REVERSED, **changes).evidence()) == []


def test_an_error_as_large_as_the_gain_is_no_gain() -> None:
    """The measured exposed time is far from the replay's: it comes from elsewhere."""
    slower = np.where(np.arange(60) % 2, 1.0, 8.0)
    result = bucket_order(run([31.0, 30.0, 32.0, 33.0], slower=slower).evidence(**FACTS))
    assert result == []


def test_parameters_that_are_spread_over_the_buckets_are_sorted_by_their_arrival() -> None:
    """Each bucket holds an early and a late parameter, so sorting whole buckets gains little."""
    spread = run([38.0, 40.0, 39.0, 37.0])
    whole = bucket_order(spread.evidence(**FACTS))
    layout = spread.layout()
    halves = [
        wire.Bucket(
            size_bytes=MB,
            dtype="float32",
            parameters=[wire.Parameter(name=f"p{index}.{half}", size=MB // 8) for half in range(2)],
        )
        for index in range(4)
    ]
    ready_ns = np.array([0, 38, 2, 40, 4, 39, 6, 37]) * 10**6
    samples = [(rank, wire.Readiness(step=8, module=0, revision=0, ready_ns=ready_ns)) for rank in range(2)]
    sampled = replace(spread, readiness=samples).evidence(**FACTS)
    columns: Any = sampled.columns
    columns._layout = wire.Layout(module=0, name="m", revision=0, comm="x", buckets=halves)
    finding = only(bucket_order(sampled))
    assert layout.buckets
    assert finding.gain is not None
    whole_gain = whole[0].gain.step_ns if whole and isinstance(whole[0], Finding) and whole[0].gain else 0
    # Two buckets of early parameters move while backward still computes the late ones.
    assert finding.gain.step_ns > whole_gain + 14 * 10**6


def test_late_buckets_are_ready_after_a_later_one() -> None:
    assert late_buckets(np.array([1.0, 5.0, 3.0, 4.0, 6.0])).tolist() == [1]
    assert late_buckets(np.array([1.0, 2.0])).tolist() == []
