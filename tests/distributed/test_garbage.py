"""Telemetry keeps few objects that the garbage collector must visit: collections would stall the ranks one by one."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddpobs import DistributedDataParallel, attach, telemetry
from tests.support.distributed.compare import batch, net
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import sending

STEPS = 300
MAX_UNREAD, MAX_WAITING = 8, 1
"""Objects per step: before the telemetry thread reads it, and while it waits for its batch (four seconds by default).
With an object per entry there were 18."""


def kept_objects() -> int:
    """Count the objects that are kept, without the garbage of the looks at the training thread."""
    gc.collect()
    return len(gc.get_objects())


def train(rank: int, world_size: int, kind: str) -> tuple[float, float]:
    with sending() as capture:
        config = replace(capture.config, flush_s=3600, pulse_s=3600)
        if kind == "attached":
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
            return kept_objects()

        steps(20)
        process._journal.entries.catch_up()
        gc.collect()
        gc.disable()
        start_objects = steps(1)
        unread_objects = steps(STEPS)
        process._journal.entries.catch_up()
        waiting_objects = kept_objects()
        gc.enable()
    assert len(capture.steps("step")) >= STEPS
    return (unread_objects - start_objects) / STEPS, (waiting_objects - start_objects) / STEPS


@pytest.mark.parametrize("kind", ["ours", "attached"])
def test_waiting_steps_are_few_objects(kind: str) -> None:
    for unread, waiting in run_ranks(train, 2, kind):
        assert 0 < unread < MAX_UNREAD
        assert waiting < MAX_WAITING
