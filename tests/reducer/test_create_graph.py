"""`backward(create_graph=True)`: gradients are reduced, and their graph stays on each rank."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddpobs import DistributedDataParallel
from tests.support.distributed.compare import batch, net
from tests.support.distributed.launch import run_ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "large gradients": {"bucket_cap_mb": 0.05},
    "views": {"bucket_cap_mb": 0.05, "gradient_as_bucket_view": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"bucket_cap_mb": 0.05, "static_graph": True},
}


def loss(module: Any, rank: int, step: int) -> torch.Tensor:
    return module(batch(rank, step)).pow(2).mean()  # type: ignore[no-any-return]


def gradients(ddp: Any, rank: int, graph: str) -> list[torch.Tensor]:
    """Return all gradients after each of five steps; `graph` has a y for each step that records its graph."""
    results: list[torch.Tensor] = []
    for step, recorded in enumerate(graph):
        if step != 3:  # The gradients of two steps are added up.
            ddp.zero_grad()
        loss(ddp, rank, step).backward(create_graph=recorded == "y")
        results += [p.grad.detach().clone() for p in ddp.parameters()]
    return results


def differences(rank: int, world_size: int) -> list[str]:
    """Return the settings in which a gradient differs from that of torch's DDP without a graph."""
    differing = []
    for name, options in OPTIONS.items():
        expected = gradients(TorchDDP(net(), **options), rank, "nnnnn")
        for graph in ("yyyyy", "nynyn"):
            actual = gradients(DistributedDataParallel(net(), **options), rank, graph)
            if not all(map(torch.equal, actual, expected)):
                differing.append(f"{name}, {graph}")
    return differing


def test_gradients_equal_those_of_torch_without_a_graph() -> None:
    assert run_ranks(differences, 2) == [[], []]


def second_derivatives(rank: int, world_size: int) -> bool:
    """Return whether a second derivative through `.grad` is that of this rank's own loss, in every step."""
    ddp = DistributedDataParallel(net(), bucket_cap_mb=0.05)
    alone = copy.deepcopy(ddp.module)
    equal = []
    for step in range(3):
        ddp.zero_grad()
        loss(ddp, rank, step).backward(create_graph=True)
        first = next(ddp.parameters()).grad
        assert first is not None
        (ours,) = torch.autograd.grad(first.sum(), ddp.module[2].weight)
        local = torch.autograd.grad(loss(alone, rank, step), list(alone.parameters()), create_graph=True)[0]
        (theirs,) = torch.autograd.grad(local.sum(), alone[2].weight)
        equal.append(torch.equal(ours, theirs))
    return all(equal)


def test_second_derivatives_are_those_of_the_ranks_own_loss() -> None:
    assert run_ranks(second_derivatives, 2) == [True, True]


def warnings_of_two_steps(rank: int, world_size: int) -> list[str]:
    ddp = DistributedDataParallel(net())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            loss(ddp, rank, step).backward(create_graph=True)
    return [str(warning.message) for warning in caught if "DistributedDataParallel" in str(warning.message)]


@pytest.mark.parametrize("ranks", [2])
def test_each_process_is_warned_once(ranks: int) -> None:
    for messages in run_ranks(warnings_of_two_steps, ranks):
        (message,) = messages
        assert "higher-order gradients are not synchronized across ranks" in message
