"""What a device has yet to bring of each backward is looked at in time, and does not pile up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from ddpobs import DistributedDataParallel
from ddpobs import horovod as hvd
from ddpobs.reducer.fault_broadcast import FaultBroadcast
from tests.distributed.launch import run_ranks


def later(alarm: FaultBroadcast, *_: object) -> None:
    """As a look at an element on a device, which has come by the next time."""
    alarm._pending_checks.append(SimpleNamespace(there=lambda: True, alarming=lambda: False))  # type: ignore[arg-type]


def most_waiting(rank: int, world_size: int) -> dict[str, int]:
    """Looks that wait after five steps of an optimizer, and after as many of other ranks' under `join`."""
    capturing = mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False)
    with capturing, mock.patch.object(FaultBroadcast, "look", later):
        model: Any = torch.nn.Linear(4, 4)
        hvd.init()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(5):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
        with ddp.join():
            for _ in range(1 + 5 * rank):
                ddp(torch.ones(2, 4)).sum().backward()
    return {
        "optimizer": len(optimizer._reducer._faults._pending_checks),
        "join": len(ddp.reducer._faults._pending_checks),
    }


def test_looks_at_what_a_device_brings_do_not_pile_up() -> None:
    assert run_ranks(most_waiting, 2) == [{"optimizer": 1, "join": 1}] * 2
