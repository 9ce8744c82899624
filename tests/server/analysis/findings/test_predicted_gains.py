"""Findings `bucket-size`, `compression-pays` and `accumulation-pays`: gains on a link of known speed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ddpobs_server.analysis.communication.fitted_steps import fitted_steps
from ddpobs_server.analysis.evidence import Evidence
from ddpobs_server.analysis.finding import Finding, NotJudged
from ddpobs_server.analysis.findings.accumulation_pays import accumulation_pays
from ddpobs_server.analysis.findings.bucket_size import bucket_size
from ddpobs_server.analysis.findings.compression_pays import compression_pays

from ddpobs import wire
from tests.support.analysis.judged import only
from tests.support.analysis.link_scenario import Run, on_hosts

MB = 10**6
FACTS = on_hosts(2, hosts=2)
MANY = Run(sizes=[MB // 10, MB // 20] * 10, ready_ms=[0.1 * number for number in range(20)], alpha_ms=5.0)
"""Twenty small buckets on a link of 5 ms latency."""
BYTES = Run(sizes=[4 * MB, MB], ready_ms=[5.0, 10.0])
"""40 ms of bytes a step."""
JUDGES = [bucket_size, compression_pays, accumulation_pays]


def step_ns(run: Run) -> float:
    return float(np.median(run.evidence().joined.step_ns))


def saved_ns(finding: Finding) -> int:
    assert finding.gain is not None
    return finding.gain.step_ns


def with_layout(evidence: Evidence, **changes: Any) -> Evidence:
    columns: Any = evidence.columns
    columns._layout = wire.Layout(
        **{name: getattr(columns._layout, name) for name in columns._layout.__struct_fields__} | changes
    )
    return evidence


def test_larger_buckets_are_predicted_to_save_the_latency_that_they_save() -> None:
    finding = only(bucket_size(MANY.evidence(**FACTS, settings={"bucket_cap_mb": 0.05})))
    merged = replace(MANY, sizes=[sum(MANY.sizes)], ready_ms=MANY.ready_ms[-1:])
    assert saved_ns(finding) == pytest.approx(step_ns(MANY) - step_ns(merged), rel=0.02)
    assert "instead of 0.05" in finding.title


def test_buckets_that_the_compiler_makes_are_not_predicted() -> None:
    evidence = MANY.evidence(**FACTS, settings={"compiled_buckets": True})
    (not_judged,) = bucket_size(evidence)
    assert isinstance(not_judged, NotJudged)
    assert not_judged.reason == fitted_steps(evidence)
    assert not_judged.reason.startswith("bucket_cap_mb does not apply")


def test_smaller_buckets_are_predicted_from_the_arrival_of_the_parameters() -> None:
    """Three parameters of 2 MB fill one bucket; by themselves the first two move while backward goes on."""
    ready_ns = np.array([0, 20, 40, 60]) * 10**6
    samples = [(rank, wire.Readiness(step=8, module=0, revision=0, ready_ns=ready_ns)) for rank in range(2)]
    run = Run(sizes=[6 * MB, MB], ready_ms=[40.0, 60.0], readiness=samples)
    parameters = [wire.Parameter(name=f"p{index}", size=MB // 2) for index in range(3)]
    buckets = [
        wire.Bucket(size_bytes=6 * MB, dtype="float32", parameters=parameters),
        wire.Bucket(size_bytes=MB, dtype="float32", parameters=[wire.Parameter(name="p3", size=MB // 4)]),
    ]
    finding = only(bucket_size(with_layout(run.evidence(**FACTS), buckets=buckets)))
    apart = Run(sizes=[2 * MB, 2 * MB, 2 * MB, MB], ready_ms=[0.0, 20.0, 40.0, 60.0])
    assert saved_ns(finding) == pytest.approx(step_ns(run) - step_ns(apart), rel=0.05)
    assert finding.verdict == "bucket_cap_mb=1 would make steps faster"


def test_half_of_the_bytes_are_predicted_to_save_what_they_save() -> None:
    finding = only(compression_pays(BYTES.evidence(**FACTS)))
    halved = replace(BYTES, sizes=[size // 2 for size in BYTES.sizes])
    casts_ns = 0.5 * sum(BYTES.sizes)
    assert saved_ns(finding) == pytest.approx(step_ns(BYTES) - step_ns(halved) - casts_ns, rel=0.02)
    assert finding.severity == "warning"


@pytest.mark.parametrize("changes", [{"comm": "bf16"}, {"comm": "powersgd:4"}])
def test_compressed_gradients_are_not_judged(changes: dict[str, Any]) -> None:
    assert compression_pays(with_layout(BYTES.evidence(**FACTS), **changes)) == []


def test_gradients_in_half_precision_are_not_judged() -> None:
    half = [wire.Bucket(size_bytes=MB, dtype="bfloat16", parameters=[wire.Parameter(name="p", size=MB // 2)])]
    assert compression_pays(with_layout(BYTES.evidence(**FACTS), buckets=half * 2)) == []


def test_three_of_four_batches_save_their_exposed_communication() -> None:
    finding = only(accumulation_pays(BYTES.evidence(**FACTS)))
    assert saved_ns(finding) == pytest.approx(0.75 * (step_ns(BYTES) - 20e6), rel=0.02)
    assert finding.severity == "info"


def test_steps_that_accumulate_already_are_not_judged() -> None:
    evidence = BYTES.evidence(**FACTS)
    evidence.steps.micro_steps[:] = 4
    assert accumulation_pays(evidence) == []


@pytest.mark.parametrize("judge", JUDGES)
def test_hidden_communication_leaves_nothing_to_gain(judge: Any) -> None:
    hidden = Run(sizes=[MB, 1000], ready_ms=[10.0, 100.0], alpha_ms=0.01)
    assert judge(hidden.evidence(**FACTS)) == []


def test_buckets_of_the_best_size_are_no_finding() -> None:
    assert bucket_size(replace(BYTES, ready_ms=[9.9, 10.0]).evidence(**FACTS)) == []


@pytest.mark.parametrize("judge", JUDGES)
def test_transfers_that_the_link_does_not_explain_are_not_judged(judge: Any) -> None:
    slower = np.where(np.arange(60) % 8 == 0, 1.0, 5.0)
    (reason,) = judge(replace(BYTES, slower=slower).evidence(**FACTS))
    assert isinstance(reason, NotJudged)
    assert "fastest tenth" in reason.reason


def test_the_advised_cap_names_the_line_to_change_and_auto_only_where_the_reducer_is_ours() -> None:
    settings: dict[str, wire.Scalar] = {"bucket_cap_mb": 0.05, "wrapped_at": "train.py:31 main", "reducer": "torch"}
    remedy = only(bucket_size(MANY.evidence(**FACTS, settings=settings))).remedy
    assert "where the module is wrapped (train.py:31 main)" in remedy
    assert "auto" not in remedy
    ours = only(bucket_size(MANY.evidence(**FACTS, settings=settings | {"reducer": "ddpobs"}))).remedy
    assert 'bucket_cap_mb="auto"' in ours
