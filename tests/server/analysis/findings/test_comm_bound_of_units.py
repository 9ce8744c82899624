"""Finding `comm-bound` of fully sharded runs: what training waits for, each kind with its remedy, and look-alikes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from ddpobs_server.analysis.finding import Finding
from ddpobs_server.analysis.findings.comm_bound import CommBoundFacts, comm_bound
from ddpobs_server.analysis.findings.prefetch_missing import prefetch_missing

from tests.support.analysis.judged import facts_of, only
from tests.support.analysis.link_scenario import on_hosts
from tests.support.analysis.scenario import MS, evidence_of, with_columns
from tests.support.analysis.unit_scenario import Sharded

MB = 10**6
FACTS = on_hosts(2, hosts=2)
comm_facts = partial(facts_of, CommBoundFacts)
LARGE = Sharded(sizes=[MB] * 6, compute_ms=[1.0] * 6)
"""17 collectives of 8.1 ms, and 18 ms of computation."""
LATE = Sharded(sizes=[MB] * 6, compute_ms=[9.0] * 6, forward_prefetch=False, backward_prefetch=False)
SMALL = Sharded(sizes=[MB // 2, *[MB // 20] * 16], compute_ms=[0.5] * 17, alpha_ms=3.0, blocks=True)

LATE_IN_TURN = Sharded(sizes=[1000] * 6, compute_ms=[12.0] * 6, late_ms=200.0, in_turn=True, forward_prefetch=False)
"""Each rank waits for the other once in a step, so that both have 200 ms of exposed communication."""


def finding_of(run: Sharded, **facts: Any) -> Finding:
    return only(comm_bound(run.evidence(**FACTS | facts)))


def saved_ns(run: Sharded, other: Sharded) -> float:
    before, after = (np.median(each.evidence().joined.step_ns) for each in (run, other))
    return float(before - after)


def test_the_wait_for_each_kind_of_collective_is_told() -> None:
    run = replace(LARGE, blocks=True)
    finding = finding_of(run)
    by_kind = comm_facts(finding).exposed_by_collective_ns
    assert by_kind is not None
    counts = {"all_gather": 6, "all_gather_again": 5, "reduce_scatter": 6}
    assert by_kind == {kind: pytest.approx(8.1 * MS * count, rel=0.001) for kind, count in counts.items()}
    assert comm_facts(finding).moving_ns == pytest.approx(sum(by_kind.values()), rel=0.001)
    assert (
        "computation does not hide; in the median step all-gather 48.6 ms, all-gather in backward 40.5 ms"
        in finding.measure
    )
    assert comm_facts(finding).bytes_a_step == 17 * MB


def test_large_units_on_a_slow_link_are_a_matter_of_bandwidth_with_the_gain_of_half_the_bytes() -> None:
    finding = finding_of(LARGE)
    assert comm_facts(finding).kind == "bandwidth"
    assert "half precision" in finding.remedy
    assert finding.gain is not None
    halved = replace(LARGE, sizes=[MB // 2] * 6)
    assert finding.gain.step_ns == pytest.approx(saved_ns(LARGE, halved), rel=0.05)


def test_units_in_half_precision_already_are_kept_gathered() -> None:
    run = replace(LARGE, dtype="bfloat16")
    finding = finding_of(run)
    assert "reshard_after_forward=False), if each rank has room for 5 MB more." in finding.remedy
    assert "half precision" not in finding.remedy
    assert finding.gain is not None
    assert finding.gain.step_ns == pytest.approx(saved_ns(run, replace(run, reshard=False)), rel=0.06)


def test_small_units_are_a_matter_of_latency_with_the_gain_of_larger_ones() -> None:
    finding = finding_of(SMALL)
    assert comm_facts(finding).kind == "latency"
    assert "unit-size" in finding.remedy
    merged = replace(SMALL, sizes=[MB // 2, MB // 20 * 16], compute_ms=[0.5, 8.0])
    assert finding.gain is not None
    assert finding.gain.step_ns == pytest.approx(saved_ns(SMALL, merged), rel=0.02)


def test_units_of_unknown_size_leave_the_cause_unknown() -> None:
    finding = finding_of(replace(SMALL, sizes=[0] * 17))
    assert comm_facts(finding).not_known_because == "the sizes of units are not known"


def test_late_launches_have_the_gain_of_prefetch_missing() -> None:
    finding = finding_of(LATE)
    assert comm_facts(finding).kind == "launch"
    assert "prefetch-missing" in finding.remedy
    assert finding.gain == only(prefetch_missing(LATE.evidence(**FACTS))).gain


def test_late_launches_that_too_few_processors_explain_too_have_no_known_cause() -> None:
    finding = finding_of(replace(LATE, blocks=True), **on_hosts(2, hosts=1, processors="0-1"))
    assert (comm_facts(finding).kind, finding.severity, finding.gain) == (None, "info", None)
    assert finding.cause.startswith("not known: it may be all-gathers that begin only after")
    assert "share 2 processors" in finding.cause


def test_collectives_that_wait_for_a_processor_are_a_matter_of_processors() -> None:
    jitter = np.where(np.arange(40) % 4 == 0, 1.0, 6.0)
    finding = finding_of(replace(LARGE, jitter=jitter), **on_hosts(2, hosts=1, processors="0-1"))
    assert (comm_facts(finding).kind, finding.severity) == ("processor", "info")
    finding = finding_of(replace(LARGE, jitter=jitter))
    assert comm_facts(finding).kind is None
    assert "as long as their fastest tenth" in finding.cause


def test_collectives_outside_of_the_units_are_not_blamed_on_them() -> None:
    run = replace(LARGE, compute_ms=[9.0] * 6).evidence(**FACTS)
    steps = with_columns(run.steps, exposed_comm_ns=run.steps.exposed_comm_ns + 200 * MS)
    finding = only(comm_bound(evidence_of(run.rank, steps, columns=run.columns, settings=run.settings)))
    assert comm_facts(finding).kind == "outside"


@pytest.mark.parametrize(
    ("run", "reason"),
    [(replace(LARGE, micro_steps=4), "several micro-batches"), (replace(LARGE, steps=20), "")],
)
def test_units_that_cannot_be_compared_leave_the_cause_unknown(run: Sharded, reason: str) -> None:
    finding = finding_of(run)
    assert (comm_facts(finding).kind is None) == bool(reason)
    assert reason in (comm_facts(finding).not_known_because or "")


@pytest.mark.parametrize(
    "run",
    [
        Sharded(sizes=[MB] * 6, compute_ms=[12.0] * 6),
        Sharded(sizes=[1000] * 6, compute_ms=[12.0] * 6, late_ms=200.0),
        LATE_IN_TURN,
    ],
    ids=["hidden", "a late rank", "late in turn"],
)
def test_steps_that_compute_or_wait_for_a_late_rank_are_not_communication(run: Sharded) -> None:
    assert comm_bound(run.evidence(**FACTS)) == []


def test_late_in_turn_would_be_moving_by_the_steps_alone() -> None:
    joined = LATE_IN_TURN.evidence().joined
    assert (joined.exposed_ns.min(axis=1) / joined.step_ns.max()).min() > 0.3
