"""Parameters that are added to an optimizer, or unfrozen, after it was wrapped."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

import ddpobs.horovod as hvd
from ddpobs.errors import HorovodError, ModelsDifferError
from tests.support.distributed.compare import net
from tests.support.distributed.horovod import alone, how_close, loss, raised
from tests.support.distributed.launch import run_ranks


def unfreezing(rank: int, ranks: int) -> tuple[str, str, str]:
    hvd.init()
    model: Any = net()
    reference = net()
    model[0].weight.requires_grad_(False)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner)
    added = raised(HorovodError, lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}))
    del optimizer
    gc.collect()  # The error's traceback held the optimizer, and the optimizer its hooks.
    model.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(inner)
    model.requires_grad_(True)
    loss(model, rank, 0).backward()
    unfrozen = raised(HorovodError, optimizer.step)
    del optimizer
    gc.collect()
    model.zero_grad()
    model[0].weight.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    model[0].weight.requires_grad_(True)
    for step in range(3):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
    alone(reference, ranks, 3)
    return added, unfrozen, how_close(model, reference)


def test_an_unfrozen_parameter_is_reduced_from_the_next_step_on() -> None:
    for added, unfrozen, close in run_ranks(unfreezing, 2):
        assert "add_param_group() after" in added
        assert "all of the optimizer's parameters were frozen" in unfrozen
        assert close == "equal"


def unfreezing_on_one_rank(rank: int, ranks: int) -> tuple[str, str]:
    hvd.init()
    model: Any = net()
    reference = net()
    model[0].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=2,
    )
    if rank == 1:
        model[0].requires_grad_(True)

    def two_passes(step: int) -> None:
        for _ in range(2):
            (loss(model, rank, step) / 2).backward()

    two_passes(0)
    differing = raised(ModelsDifferError, optimizer.step)
    model.zero_grad()
    model[0].requires_grad_(True)
    for step in range(3):
        optimizer.zero_grad()
        two_passes(step)
        optimizer.step()
    alone(reference, ranks, 3)
    return differing, how_close(model, reference)


def test_every_rank_gets_the_names_if_the_ranks_differ() -> None:
    for differing, close in run_ranks(unfreezing_on_one_rank, 2):
        assert "none (rank 0); 0.weight, 0.bias (rank 1)" in differing
        assert close in {"equal", "close"}
