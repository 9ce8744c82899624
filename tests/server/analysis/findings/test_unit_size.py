"""Finding `unit-size`: units that are too small for the link, and a model that is a single one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ddpobs_server.analysis.findings.unit_size import UnitSizeFacts, unit_size

from tests.support.analysis.judged import facts_of, only
from tests.support.analysis.link_scenario import on_hosts
from tests.support.analysis.unit_scenario import Sharded

MB = 10**6
FACTS = on_hosts(2, hosts=2)
SMALL = Sharded(sizes=[MB // 2, *[MB // 20] * 16], compute_ms=[2.0] * 17, alpha_ms=3.0, blocks=True)
LARGE = Sharded(sizes=[20 * MB], compute_ms=[120.0])


def saved_ns(run: Sharded, other: Sharded) -> float:
    before, after = (np.median(each.evidence().joined.step_ns) for each in (run, other))
    return float(before - after)


def test_the_gain_of_larger_units_is_what_the_run_with_them_saves() -> None:
    finding = only(unit_size(SMALL.evidence(**FACTS)))
    merged = replace(SMALL, sizes=[MB // 2, MB // 20 * 16], compute_ms=[2.0, 32.0])
    assert finding.verdict == "Larger units would make steps faster"
    assert "up to 1 MB each" in finding.remedy
    assert finding.gain is not None
    assert finding.gain.step_ns == pytest.approx(saved_ns(SMALL, merged), rel=0.02)
    assert facts_of(UnitSizeFacts, finding).latency_ns["all_gather"] == pytest.approx(3e6, rel=0.01)


def test_units_whose_bytes_take_the_time_are_not_merged() -> None:
    run = replace(SMALL, sizes=[10 * MB, *[4 * MB] * 4], compute_ms=[2.0] * 5, alpha_ms=0.05)
    assert unit_size(run.evidence(**FACTS)) == []


def test_latency_that_small_units_of_one_size_do_not_tell_is_named_as_the_reason() -> None:
    run = replace(SMALL, sizes=[MB // 10] * 16, compute_ms=[2.0] * 16)
    (result,) = unit_size(run.evidence(**FACTS))
    reason = "all units have about 100 kB: the latency of a collective is not known apart from the time of its bytes"
    assert str(result) == f"unit-size: {reason}"
    assert unit_size(replace(run, sizes=[4 * MB] * 16).evidence(**FACTS)) == []


def test_the_gain_of_a_divided_model_is_what_the_run_with_its_units_saves() -> None:
    finding = only(unit_size(LARGE.evidence(**FACTS)))
    divided = replace(LARGE, sizes=[20 * MB // 8] * 8, compute_ms=[15.0] * 8)
    assert finding.verdict == "The model is a single unit, which no computation hides"
    assert "8 units" in finding.remedy
    assert finding.gain is not None
    assert finding.gain.step_ns == pytest.approx(saved_ns(LARGE, divided), rel=0.05)
    assert finding.parameters == ["(root).w"]


def test_units_of_unknown_size_are_not_judged() -> None:
    """A trace over gloo has no sizes."""
    (result,) = unit_size(replace(SMALL, sizes=[0] * 17).evidence(**FACTS))
    assert str(result) == "unit-size: the sizes of units are not known"


def test_where_collectives_block_a_division_hides_nothing() -> None:
    assert unit_size(replace(LARGE, blocks=True).evidence(**FACTS)) == []


def test_units_that_move_beside_the_computation_are_no_finding() -> None:
    run = Sharded(sizes=[MB] * 8, compute_ms=[12.0] * 8)
    assert unit_size(run.evidence(**FACTS)) == []
