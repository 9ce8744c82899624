"""Fault flags that a device has yet to deliver are checked in later calls, so that they do not accumulate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from ddpobs import DistributedDataParallel
from ddpobs import horovod as hvd
from ddpobs.reducer.fault_broadcast import FaultBroadcast
from tests.support.distributed.launch import run_ranks


def check_later(faults: FaultBroadcast, *_: object) -> None:
    """Act as for a flag on a device, which arrives before the next call."""
    faults._pending_checks.append(SimpleNamespace(is_ready=lambda: True, is_nan=lambda: False))  # type: ignore[arg-type]


def pending_checks(rank: int, world_size: int) -> dict[str, int]:
    """Flags not checked yet after five steps of an optimizer, and after five steps of other ranks under `join`."""
    capturing = mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False)
    with capturing, mock.patch.object(FaultBroadcast, "check_flag", check_later):
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
        "optimizer": len(optimizer._reducer.core.faults._pending_checks),
        "join": len(ddp.reducer.core.faults._pending_checks),
    }


def test_flags_that_a_device_delivers_late_do_not_accumulate() -> None:
    assert run_ranks(pending_checks, 2) == [{"optimizer": 1, "join": 1}] * 2
