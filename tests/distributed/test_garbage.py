"""Telemetry keeps next to nothing that the garbage collector has to go over: that would stop ranks one by one."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddpobs import DistributedDataParallel, attach, telemetry
from tests.distributed.compare import batch, net
from tests.distributed.launch import run_ranks
from tests.distributed.sent import sending

STEPS = 300
BEFORE, AFTER = 8, 1
"""Objects a step, before the thread has seen it and while it waits for its batch, four seconds by default. An object an
entry was 18."""


def train(rank: int, world_size: int, way: str) -> tuple[float, float]:
    with sending() as sent:
        config = replace(sent.config, flush_s=3600, pulse_s=3600)
        if way == "attached":
            ddp: Any = TorchDDP(net())
            attach(ddp, config)
        else:
            ddp = DistributedDataParallel(net(), telemetry=config)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        process = telemetry._process
        assert process is not None

        def steps(count: int) -> int:
            for step in range(count):
                optimizer.zero_grad()
                ddp(batch(rank, step)).sum().backward()
                optimizer.step()
            return len(gc.get_objects())

        steps(20)
        process._journal.catch_up()
        gc.collect()
        gc.disable()
        began = steps(1)
        before = steps(STEPS)
        process._journal.catch_up()
        after = len(gc.get_objects())
        gc.enable()
    assert len(sent.steps("step")) >= STEPS
    return (before - began) / STEPS, (after - began) / STEPS


@pytest.mark.parametrize("way", ["ours", "attached"])
def test_steps_that_wait_are_few_objects(way: str) -> None:
    for before, after in run_ranks(train, 2, way):
        assert 0 < before < BEFORE
        assert after < AFTER
