"""Counters, sizes of inputs and the machine's state arrive from every front door."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import ddpobs
import ddpobs.horovod as hvd
from ddpobs import wire
from ddpobs.steps.counters import COUNTERS
from tests.support.distributed.compare import batch, net, train
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import Sent, sending

STEPS = 4


def ours(rank: int, sent: Sent) -> None:
    train(ddpobs.DistributedDataParallel(net(), telemetry=sent.config), rank, STEPS)


def attached(rank: int, sent: Sent) -> None:
    model = TorchDDP(net())
    ddpobs.attach(model, telemetry=sent.config)
    train(model, rank, STEPS)


def horovod(rank: int, sent: Sent) -> None:
    hvd.init()
    model = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), telemetry=sent.config)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(rank, step)).sum().backward()
        optimizer.step()


def counted(rank: int, _: int, training: Callable[[int, Sent], None]) -> dict[str, Any]:
    callbacks = list(gc.callbacks)
    with sending() as sent:
        training(rank, sent)
    assert gc.callbacks == callbacks
    machines = [batch.pulse.machine for batch in sent.batches if batch.pulse is not None]
    columns = {name: sent.steps(name) for name in (*COUNTERS, "elements", "longest", "own_ns")}
    return columns | {"has_machine": any(machine is not None and machine.processors > 0 for machine in machines)}


@pytest.mark.skipif(sys.platform != "linux", reason="the counters are Linux's")
@pytest.mark.parametrize("training", [ours, attached, horovod])
def test_every_step_but_the_first_is_counted(training: Callable[[int, Sent], None]) -> None:
    for columns in run_ranks(counted, 2, training):
        for name in COUNTERS:
            assert columns[name][0] == wire.UNKNOWN, name
            assert min(columns[name][1:]) >= 0, name
        scheduled_ns = sum(columns["running_ns"][1:]) + sum(columns["run_delay_ns"][1:])
        assert scheduled_ns > 0.2 * sum(columns["own_ns"][1:])
        assert set(columns["elements"]) == {batch(0, 0).numel()}
        assert set(columns["longest"]) == {batch(0, 0).shape[1]}
        assert columns["has_machine"]
