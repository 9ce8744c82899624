"""Collectives and changes of gradients between backward and step, during the reduction."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import ddpobs.horovod as hvd
from tests.support.distributed.compare import net
from tests.support.distributed.horovod import alone, half_used, how_close, loss
from tests.support.distributed.launch import run_ranks


def with_metrics(rank: int, ranks: int) -> tuple[str, list[float]]:
    """Rank 1 leaves the last layer out, so that its bucket starts in `step`, after the metric's mean."""
    hvd.init()
    model, reference = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    means = []
    for step in range(4):
        optimizer.zero_grad()
        half_used(model, rank, step).backward()
        means.append(float(hvd.allreduce(torch.tensor(float(rank + step)))))
        optimizer.step()
    alone(reference, ranks, 4, loss_fn=half_used)
    return how_close(model, reference), means


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_metric_may_be_reduced_before_the_step_if_a_rank_leaves_parameters_out(ranks: int) -> None:
    for close, means in run_ranks(with_metrics, ranks):
        assert close == "equal" or float(close.removeprefix("off by ")) < 1e-6
        assert means == [(ranks - 1) / 2 + step for step in range(4)]


def of_parts(rank: int, ranks: int) -> Any:
    """Train with an optimizer per layer; rank 1 leaves out the last layer, which rank 0 reduces first."""
    hvd.init()
    model: Any = net()
    reference = net()
    parts = [hvd.DistributedOptimizer(torch.optim.SGD(model[layer].parameters(), 0.05, 0.9)) for layer in (0, 2, 4)]
    for step in range(4):
        for optimizer in parts:
            optimizer.zero_grad()
        half_used(model, rank, step).backward()
        for optimizer in parts:
            optimizer.step()
    alone(reference, ranks, 4, loss_fn=half_used)
    groups_of_parts = [optimizer._reducer.core.group for optimizer in parts]
    del parts[0], optimizer
    gc.collect()
    again = hvd.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), 0.05))
    return how_close(model, reference), len(set(groups_of_parts)), again._reducer.core.group is groups_of_parts[0]


def test_optimizers_of_parts_may_be_ready_in_any_order() -> None:
    for close, groups, again in run_ranks(of_parts, 2):
        assert close == "equal"
        assert groups == 3
        assert again  # A later optimizer reuses the connections of a collected one.


def replacing(rank: int, ranks: int) -> dict[str, str]:
    hvd.init()
    results = {}
    for how in ("grad", "data", "none"):
        model, reference = net(1000), net(1000)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        for step in range(3):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            for parameter in model.parameters():
                replace(parameter, how)
            optimizer.step()
        alone(reference, ranks, 3)
        results[how] = how_close(model, reference)
    return results


def replace(parameter: nn.Parameter, how: str) -> None:
    assert parameter.grad is not None
    if how == "data":
        parameter.grad.data = parameter.grad.clone()
    else:
        parameter.grad = parameter.grad.clone() if how == "grad" else None


def test_a_gradient_replaced_before_the_step_is_overwritten_by_the_reduced_one() -> None:
    assert run_ranks(replacing, 2) == [dict.fromkeys(("grad", "data", "none"), "equal")] * 2
