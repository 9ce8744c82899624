"""Engines of the real DeepSpeed, on gloo and CPU: their steps, phases and collectives."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch

import ddpobs
from ddpobs import wire
from ddpobs.errors import DdpobsError
from tests.support.distributed.compare import batch, raising_in_backward
from tests.support.distributed.engines import DIVIDED, engine, find_deepspeed, train_engine
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import sending

find_deepspeed()
STEPS = 5
PARAMETERS = 4 * sum((8 * 64 + 64, 64 * 64 + 64, 64 * 2 + 2))
"""Bytes of all parameters."""
LINEARS = ("0", "2", "4")


def trained(rank: int, _size: int, stage: int, passes: int = 1, direct: bool = False, **zero: Any) -> dict[str, Any]:
    plain = train_engine(engine(stage, passes, **zero), rank, STEPS, passes, direct)
    with sending() as sent:
        built = engine(stage, passes, **zero)
        attachment = ddpobs.attach(built, sent.config)
        assert attachment is not None
        assert ddpobs.attach(built, sent.config) is attachment
        observed = train_engine(built, rank, STEPS, passes, direct)
    return {
        "plain": plain,
        "observed": observed,
        "layouts": sent.layouts,
        "spans": {name: sent.spans(name) for name in wire.Spans.names},
        "steps": {name: sent.steps(name) for name in wire.Steps.names},
        "phases": sent.phases(),
        "comms": sent.comms("kind"),
    }


TRAININGS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in (0, 1, 2)},
    "stage 3, engine.backward": {"stage": 3, **DIVIDED},
    "stage 3, loss.backward": {"stage": 3, "direct": True, **DIVIDED},
    **{f"stage {stage}, two passes": {"stage": stage, "passes": 2} for stage in (1, 2, 3)},
}
FAILURES = ((0, "step"), (2, "step"), (3, "forward"), (3, "backward"))
"""A stage, and what fails there."""


def all_trained(rank: int, size: int) -> dict[str, dict[str, Any]]:
    return {name: trained(rank, size, **case) for name, case in TRAININGS.items()}


@pytest.fixture(scope="module")
def trainings() -> dict[str, list[dict[str, Any]]]:
    """Each training's records by rank, of one launch: a rank imports DeepSpeed longer than it trains."""
    ranks = run_ranks(all_trained, 2)
    return {name: [rank[name] for rank in ranks] for name in TRAININGS}


def check_steps(rank: dict[str, Any], passes: int = 1) -> None:
    """Require the same result, and steps whose phases add up."""
    assert rank["observed"] == rank["plain"]
    steps, spans = rank["steps"], rank["spans"]
    assert steps["step"] == steps["collective"] == list(range(STEPS))
    assert set(steps["micro_steps"]) == {passes}
    durations = [end - start for start, end in zip(steps["start_ns"], steps["end_ns"], strict=True)]
    assert [sum(phases.values()) for phases in rank["phases"]] == durations
    for step, phases in enumerate(rank["phases"]):
        assert min(phases["forward"], phases["backward"], phases["optimizer"]) > 0
        waited = sum(ns for ns, number in zip(spans["waited_ns"], spans["step"], strict=True) if number == step)
        assert 0 < waited <= phases["exposed_comm"]
    for ready, launched, done in zip(spans["ready_ns"], spans["launched_ns"], spans["done_ns"], strict=True):
        assert ready <= launched < done
    assert rank["comms"] == []


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_engine_has_steps_phases_and_the_collectives_of_its_stage(trainings: dict[str, Any], stage: int) -> None:
    for rank in trainings[f"stage {stage}"]:
        check_steps(rank)
        (layout,) = rank["layouts"]
        gradients, *in_optimizer = layout.buckets
        assert (gradients.kind, gradients.size_bytes, gradients.dtype) == ("all_reduce", PARAMETERS, "float32")
        assert gradients.unit == ("gradients.1" if stage == 0 else "0 and 2 more")
        assert [bucket.kind for bucket in in_optimizer] == ["all_reduce", "all_gather_updated"][
            : 1 if stage == 0 else 2
        ]
        assert stage == 0 or PARAMETERS <= in_optimizer[1].size_bytes < PARAMETERS + 64  # It is padded.
        assert Counter(rank["spans"]["bucket"]) == dict.fromkeys(range(len(layout.buckets)), STEPS)


@pytest.mark.parametrize("call", ["engine.backward", "loss.backward"])
def test_stage_3_gathers_units_that_are_named_by_their_modules(trainings: dict[str, Any], call: str) -> None:
    for rank in trainings[f"stage 3, {call}"]:
        check_steps(rank)
        first = rank["layouts"][0].buckets
        for kind in ("all_gather", "all_gather_again"):
            assert {bucket.unit for bucket in first if bucket.kind == kind} == set(LINEARS)
        scattered = [
            parameter.name for bucket in first if bucket.kind == "reduce_scatter" for parameter in bucket.parameters
        ]
        assert sorted(scattered) == [f"{name}.{part}" for name in LINEARS for part in ("bias", "weight")]
        for bucket in rank["layouts"][-1].buckets:
            if bucket.parameters:
                assert bucket.size_bytes == 4 * sum(parameter.size for parameter in bucket.parameters)
        # From the second step on ZeRO gathers ahead, as it has seen the order of the modules.
        assert len({layout.revision for layout in rank["layouts"]}) <= 3


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_micro_batches_are_one_step_and_use_the_same_rows(trainings: dict[str, Any], stage: int) -> None:
    reductions = {1: 1, 2: 2, 3: 2}[stage]
    kind = "reduce_scatter" if stage == 3 else "all_reduce"
    for rank in trainings[f"stage {stage}, two passes"]:
        check_steps(rank, passes=2)
        buckets = rank["layouts"][-1].buckets
        (row,) = [row for row, bucket in enumerate(buckets) if bucket.kind == kind and bucket.parameters]
        assert Counter(rank["spans"]["bucket"])[row] == reductions * STEPS


def evaluated(rank: int, _size: int) -> dict[str, Any]:
    with sending() as sent:
        built = engine(3, **DIVIDED)
        attachment = ddpobs.attach(built, sent.config)
        assert attachment is not None
        train_engine(built, rank, STEPS)
        built.eval()
        with torch.no_grad():
            for number in range(3):
                built(batch(rank, number))
        built.train()
        train_engine(built, rank, STEPS)
        attachment.detach()
        rest = train_engine(built, rank, 1)
    patched = [
        name
        for name in ("forward", "_backward_epilogue", "_take_model_step")
        if hasattr(getattr(type(built), name), "__wrapped__")
    ]
    return {"steps": sent.steps("step"), "rest": rest, "patched": patched}


def test_an_evaluation_is_no_step_and_a_detached_engine_is_not_recorded() -> None:
    for rank in run_ranks(evaluated, 2):
        assert rank["steps"] == list(range(2 * STEPS))
        assert rank["patched"] == []
        assert len(rank["rest"]) == 1


def failed(rank: int, _size: int, stage: int, where: str) -> tuple[int, dict[str, list[int]]]:
    """Train a step, fail in another one, and train one more; return the time after the failure, and the spans."""
    with sending() as sent:
        built = engine(stage, **(DIVIDED if stage == 3 else {}))
        ddpobs.attach(built, sent.config)
        train_engine(built, rank, 1)
        with ExitStack() as stack:
            if where == "forward":
                stack.callback(built.module[4].register_forward_hook(_fail).remove)
            elif where == "step":
                stack.enter_context(patch.object(built.optimizer, "step", _fail))
            stack.enter_context(pytest.raises(ValueError, match="it fails"))
            loss = built(batch(rank, 1))
            built.backward((raising_in_backward(loss) if where == "backward" else loss).sum())
            built.step()
        failed_ns = time.monotonic_ns()
        train_engine(built, rank, 1)
    return failed_ns, {name: sent.spans(name) for name in ("step", "bucket", "launched_ns")}


def _fail(*_: Any, **__: Any) -> None:
    raise ValueError("it fails")


def all_failed(rank: int, size: int) -> list[tuple[int, dict[str, list[int]]]]:
    return [failed(rank, size, *failure) for failure in FAILURES]


def test_what_fails_leaves_no_spans_to_the_next_step() -> None:
    for failures in run_ranks(all_failed, 2):
        for failure, (failed_ns, spans) in zip(FAILURES, failures, strict=True):
            launched = [ns for ns, step in zip(spans["launched_ns"], spans["step"], strict=True) if step == 1]
            assert launched, failure
            assert min(launched) > failed_ns, failure


def test_an_engine_of_a_pipeline_is_refused() -> None:
    class PipelineEngine:
        """Stands for DeepSpeed's class of that name."""

    from ddpobs.deepspeed import attach

    with pytest.raises(DdpobsError, match="PipelineEngine is not recorded"):
        attach(PipelineEngine(), telemetry=False)
