"""The spans of torchtitan's own logger, in loops that emit them in the order of its trainer."""

from __future__ import annotations

import os
import time
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ddpobs
from tests.support.distributed.compare import batch, grad
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import sending
from tests.support.distributed.sharded import Blocks, sharded

STEPS, EVALUATED_STEP = 6, 4
FETCH_S, EVALUATION_S = 0.01, 0.5


def trained(rank: int, _size: int, shards: bool) -> dict[str, Any]:
    from torchtitan.observability import structured_logger as sl

    with sending() as sent, TemporaryDirectory() as folder:
        os.environ |= {
            "TITAN_STRUCT_LOGGER_HANDLERS": "ddpobs.titan.register",
            "DDPOBS_TELEMETRY": sent.config.collector,
            "DDPOBS_SPOOL": str(sent.config.spool),
            "DDPOBS_FLUSH_S": str(sent.config.flush_s),
            "DDPOBS_QUIET": "1",
        }
        sl.init_structured_logger(source="training", output_dir=folder)
        model: Any = sharded() if shards else Blocks()
        if shards:
            ddpobs.attach(model, telemetry=None)
        train(model, rank, shards)
    names = ("step", "collective", "micro_steps", "start_ns", "end_ns")
    return {name: sent.steps(name) for name in names} | {"phases": sent.phases()}


def train(model: Any, rank: int, shards: bool) -> None:
    """Train with two micro-batches a step, unless FSDP2 reduces the gradients of each."""
    from torchtitan.observability.structured_logger import log_trace_span, set_step

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, STEPS + 1):
        set_step(step)
        with log_trace_span("step"):
            optimizer.zero_grad()
            batches = []
            for _ in range(1 if shards else 2):
                with log_trace_span("fetching_batch"):
                    time.sleep(FETCH_S)
                    batches.append(batch(rank, step))
            for rows in batches:
                with log_trace_span("fwd_bwd"):
                    model(rows).pow(2).mean().backward()
            for parameter in [] if shards else model.parameters():
                dist.all_reduce(grad(parameter))
            with log_trace_span("optim"):
                optimizer.step()
            if step == EVALUATED_STEP:
                evaluate(model, rank)


def evaluate(model: Any, rank: int) -> None:
    from torchtitan.observability.structured_logger import log_trace_span

    with log_trace_span("eval"), torch.no_grad():
        model.eval()
        model(batch(rank, 0))
        time.sleep(EVALUATION_S)
        model.train()


@pytest.mark.parametrize("shards", [True, False], ids=["FSDP2", "no other door"])
def test_spans_make_steps_and_phases(shards: bool) -> None:
    """Without another door, the first step shows that there is none, and is not recorded."""
    steps = STEPS if shards else STEPS - 1
    for rank in run_ranks(trained, 2, shards):
        assert rank["step"] == rank["collective"] == list(range(steps))
        assert set(rank["micro_steps"]) == {1 if shards else 2}
        durations = [end - start for start, end in zip(rank["start_ns"], rank["end_ns"], strict=True)]
        assert [sum(phases.values()) for phases in rank["phases"]] == durations
        evaluated_before = steps - STEPS + EVALUATED_STEP
        assert rank["start_ns"][evaluated_before] - rank["end_ns"][evaluated_before - 1] >= EVALUATION_S * 1e9
        for step, phases in list(enumerate(rank["phases"]))[1:]:
            # Telemetry cannot know that the first fetch after an evaluation is not the evaluation's.
            fetches = 1 if shards or step == evaluated_before else 2
            assert phases["data"] >= fetches * FETCH_S * 1e9
            assert min(phases["forward"], phases["backward"], phases["optimizer"]) > 0
