"""Parameters that are added to an optimizer, or unfrozen, after it was wrapped."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

import ddpobs.horovod as hvd
from ddpobs.errors import HorovodError
from tests.distributed.compare import net
from tests.distributed.launch import run_ranks
from tests.distributed.test_horovod import alone, how_close, loss, raised


def unfreezing(rank: int, ranks: int) -> tuple[str, str, str]:
    hvd.init()
    model: Any = net()
    reference = net()
    model[0].weight.requires_grad_(False)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner)
    added = raised(HorovodError, lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}))
    model[0].weight.requires_grad_(True)
    loss(model, rank, 0).backward()
    unfrozen = raised(HorovodError, optimizer.step)
    del optimizer
    gc.collect()  # The error's traceback held the optimizer, and the optimizer its hooks.
    model.zero_grad()
    optimizer = hvd.DistributedOptimizer(inner)
    for step in range(3):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
    alone(reference, ranks, 3)
    return added, unfrozen, how_close(model, reference)


def test_parameters_that_would_not_be_reduced_raise_and_another_wrapper_reduces_them() -> None:
    for added, unfrozen, close in run_ranks(unfreezing, 2):
        assert "add_param_group() after" in added
        assert "1 of the optimizer's parameters were frozen" in unfrozen
        assert "[200, 8]" in unfrozen
        assert close == "equal"
