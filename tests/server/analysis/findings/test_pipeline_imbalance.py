"""Finding `pipeline-imbalance`, and the straggler among a stage's replicas."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ddpobs_server.analysis.finding import Finding, NotJudged
from ddpobs_server.analysis.findings.comm_bound import comm_bound
from ddpobs_server.analysis.findings.pipeline_imbalance import PipelineImbalanceFacts, layer_of, pipeline_imbalance
from ddpobs_server.analysis.findings.straggler import straggler
from ddpobs_server.analysis.slow_ranks.facts import SlowRankFacts

from ddpobs import wire
from tests.support.analysis.judged import facts_of
from tests.support.analysis.pipeline_scenario import events, evidence_of
from tests.support.analysis.scenario import MS


def layout(module: int, layers: int) -> wire.Layout:
    names = [wire.Parameter(name=f"{layer}.weight", size=1) for layer in range(layers)]
    bucket = wire.Bucket(size_bytes=4, dtype="float32", parameters=names)
    return wire.Layout(module=module, name="model", revision=0, comm="all_reduce", buckets=[bucket])


def reader(**layers: int) -> Any:
    """Columns with one layout per module."""
    layouts = [layout(int(module.removeprefix("module")), count) for module, count in layers.items()]
    return SimpleNamespace(layouts=lambda: layouts, spans=None, comms=None, readiness=None)


def test_the_stage_that_computes_longest_is_named_with_the_gain_of_moving_a_layer() -> None:
    """48 ms over 6 layers beside 16 ms over 2: moved to 40 and 24 ms, a step takes 46 ms instead of 52 ms."""
    (finding,) = pipeline_imbalance(evidence_of([16, 16, 48, 48], columns=reader(module0=2, module2=6)))
    assert isinstance(finding, Finding)
    assert finding.ranks == [2, 3]
    assert (finding.verdict, finding.where) == ("The pipeline waits for stage 1", "ranks 2 and 3")
    assert finding.measure == ("12 ms of computation per micro-batch, 8 ms (200 %) more than the other stages")
    assert finding.remedy == "Move one of its 6 layers to stage 0, and measure again."
    assert finding.gain is not None
    assert (finding.gain.step_ns, finding.gain.error_ratio) == (6 * MS, 0)
    assert facts_of(PipelineImbalanceFacts, finding).balanced_saves_ns == 12 * MS
    assert finding.severity == "warning"


def test_a_stage_of_one_large_layer_is_to_be_divided() -> None:
    (finding,) = pipeline_imbalance(evidence_of([16, 16, 48, 48], columns=reader(module0=2, module2=1)))
    assert isinstance(finding, Finding)
    assert finding.gain is None
    assert "would save nothing" in finding.remedy
    assert finding.remedy.startswith("Divide stage 1 into smaller layers")


def test_without_layouts_the_gain_is_not_claimed() -> None:
    (finding,) = pipeline_imbalance(evidence_of([16, 16, 48, 48]))
    assert isinstance(finding, Finding)
    assert finding.gain is None
    assert "layers are not known" in finding.remedy


@pytest.mark.parametrize(
    "computing_ms",
    [[40.0] * 4, [40, 60, 42, 42], [20, 400, 23, 23]],
    ids=["equal", "one slow replica", "a difference that costs little of the step"],
)
def test_equal_stages_are_no_finding(computing_ms: list[float]) -> None:
    assert pipeline_imbalance(evidence_of(computing_ms)) == []


def test_few_steps_are_not_judged() -> None:
    (result,) = pipeline_imbalance(evidence_of([16, 16, 48, 48], steps=19))
    assert isinstance(result, NotJudged)


def test_a_run_without_a_pipeline_is_not_looked_at() -> None:
    assert pipeline_imbalance(evidence_of([16, 16, 48, 48], events=[])) == []


def test_the_layer_of_a_parameter() -> None:
    names = ["layers.3.attention.weight", "0.bias", "head.weight"]
    assert [layer_of(name) for name in names] == ["layers.3", "0", "head"]


def test_a_slow_replica_is_named_within_its_stage() -> None:
    """Stage 1 takes three times as long, which is no straggling; rank 1 is slower than rank 0."""
    findings = straggler(evidence_of([16, 16, 48, 48], own_ms=[16, 26, 48, 48]))
    (finding,) = [found for found in findings if isinstance(found, Finding)]
    assert (finding.ranks, facts_of(SlowRankFacts, finding).stages) == ([1], [0])
    assert finding.measure.startswith("+10 ms a step over the other replicas of stage 0, ")


def test_waits_for_messages_are_not_taken_for_a_slow_link() -> None:
    (result,) = comm_bound(evidence_of([16, 16, 48, 48], events=events()))
    assert isinstance(result, NotJudged)
