"""Finding `prefetch-missing`: all-gathers that begin late, and the saving of an earlier launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ddpobs_server.analysis.finding import NotJudged
from ddpobs_server.analysis.findings.prefetch_missing import PrefetchMissingFacts, prefetch_missing

from ddpobs import wire
from tests.support.analysis.judged import facts_of, only
from tests.support.analysis.link_scenario import on_hosts
from tests.support.analysis.unit_scenario import Sharded

MB = 10**6
FACTS = on_hosts(2, hosts=2)
RUN = Sharded(sizes=[MB, *[MB] * 5], compute_ms=[6.0, *[12.0] * 5])
"""An all-gather takes 8.1 ms."""
LATE = replace(RUN, forward_prefetch=False)


def saved_ns(run: Sharded, other: Sharded) -> float:
    before, after = (np.median(each.evidence().joined.step_ns) for each in (run, other))
    return float(before - after)


@pytest.mark.parametrize(
    "changes",
    [{"forward_prefetch": False}, {"forward_prefetch": False, "backward_prefetch": False}],
)
def test_the_gain_is_what_the_run_with_prefetch_saves(changes: dict[str, bool]) -> None:
    run = replace(RUN, **changes)  # type: ignore[arg-type]
    finding = only(prefetch_missing(run.evidence(**FACTS)))
    assert finding.gain is not None
    assert finding.gain.step_ns == pytest.approx(saved_ns(run, RUN), rel=0.05)


def test_the_pass_and_the_all_gathers_are_named() -> None:
    finding = only(prefetch_missing(LATE.evidence(**FACTS)))
    facts = facts_of(PrefetchMissingFacts, finding)
    assert finding.verdict == "Forward waits for all-gathers that could begin earlier"
    assert finding.where == "all-gather of unit blocks.1"
    assert len(facts.saved_by_unit_ns) == 5
    assert "set_modules_to_forward_prefetch" in finding.remedy
    assert "backward" not in finding.remedy


def test_all_gathers_that_block_the_computation_are_hidden_by_asynchronous_ones() -> None:
    blocking = replace(RUN, blocks=True, forward_prefetch=False)
    finding = only(prefetch_missing(blocking.evidence(**FACTS)))
    facts = facts_of(PrefetchMissingFacts, finding)
    assert facts.blocks
    assert "unshard(async_op=True)" in finding.remedy
    assert finding.gain is not None
    # The reduce-scatters would still block.
    assert 9 * 6e6 < finding.gain.step_ns < saved_ns(blocking, RUN)


def test_after_asynchronous_gathers_in_forward_only_those_of_backward_are_left() -> None:
    blocking = replace(RUN, blocks=True, forward_prefetch=False)
    remedied = replace(RUN, blocks=True, gathers_beside=True)
    before, after = (only(prefetch_missing(run.evidence(**FACTS))) for run in (blocking, remedied))
    assert after.verdict == "Backward waits for all-gathers that could begin earlier"
    assert facts_of(PrefetchMissingFacts, after).blocks
    assert before.gain is not None
    assert after.gain is not None
    assert before.gain.step_ns - after.gain.step_ns == pytest.approx(saved_ns(blocking, remedied), rel=0.05)


@pytest.mark.parametrize(
    "run",
    [
        RUN,
        # Each begins when the one before is done: the link is the limit.
        replace(RUN, compute_ms=[1.0] * 6),
        # The others wait for rank 1, which waits for nobody.
        replace(RUN, sizes=[1000] * 6, late_ms=40.0, forward_prefetch=False),
        replace(RUN, reshard=False),
    ],
    ids=["prefetched", "a full link", "a late rank", "none in backward"],
)
def test_waits_that_no_earlier_launch_hides_are_no_finding(run: Sharded) -> None:
    assert prefetch_missing(run.evidence(**FACTS)) == []


@pytest.mark.parametrize(
    ("run", "facts", "reason"),
    [
        (replace(LATE, steps=10), FACTS, "10 of 20 steps"),
        (replace(LATE, micro_steps=4), FACTS, "several micro-batches"),
        (LATE, FACTS | {"columns": None}, "not available"),
        (LATE, FACTS | {"separate_groups_reason": "ranks of other groups"}, "ranks of other groups"),
        (replace(LATE, jitter=np.where(np.arange(40) % 4 == 0, 1.0, 6.0)), FACTS, "beyond that of their fastest tenth"),
        (replace(LATE, blocks=True), on_hosts(2, hosts=1, processors="0-1"), "share 2 processors"),
        (LATE, on_hosts(2, hosts=1, processors="0-1"), "share 2 processors"),
    ],
)
def test_what_the_evidence_does_not_show_is_not_judged(run: Sharded, facts: dict[str, Any], reason: str) -> None:
    (result,) = prefetch_missing(run.evidence(**facts))
    assert isinstance(result, NotJudged)
    assert reason in str(result)


def test_units_that_a_step_uses_twice_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = LATE.evidence(**FACTS)
    columns: Any = evidence.columns
    read = columns.spans

    def twice(*bounds: Any) -> tuple[wire.Ints, wire.Spans]:
        rank, spans = read(*bounds)
        rows = np.repeat(np.arange(len(spans)), 1 + (spans.bucket % 3 == 1))
        return rank[rows], spans.select(rows)

    monkeypatch.setattr(columns, "spans", twice)
    (result,) = prefetch_missing(evidence)
    assert "steps gather a unit several times" in str(result)
