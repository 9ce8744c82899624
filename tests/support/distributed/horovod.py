"""Small trainings over Horovod's interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ddpobs.horovod as hvd
from tests.support.distributed.compare import batch

Loss = Callable[[nn.Module, int, int], torch.Tensor]


def loss(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    mean: torch.Tensor = model(batch(rank, number)).pow(2).mean()
    return mean


def half_used(model: Any, rank: int, number: int) -> torch.Tensor:
    """The last layer is left out on rank 1, and on every rank in the third batch."""
    layers = list(model)
    used = layers[:-1] if rank == 1 or number == 2 else layers
    return loss(nn.Sequential(*used), rank, number)


def alone(  # noqa: PLR0917
    model: nn.Module, ranks: int, steps: int, passes: int = 1, loss_fn: Loss = loss, total: bool = False
) -> None:
    """Compute the training of all ranks on one rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    parameters = list(model.parameters())
    for step in range(steps):
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for rank in range(ranks):
            optimizer.zero_grad()
            for number in range(step * passes, (step + 1) * passes):
                loss_fn(model, rank, number).backward()
            for added, parameter in zip(sums, parameters, strict=True):
                added.add_(parameter.grad if parameter.grad is not None else 0)
        for added, parameter in zip(sums, parameters, strict=True):
            parameter.grad = added if total else added / ranks
        optimizer.step()


def together(model: nn.Module, rank: int, steps: int, passes: int = 1, loss_fn: Loss = loss, **options: Any) -> Any:
    """The same training with a DistributedOptimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=passes, **options
    )
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(step * passes, (step + 1) * passes):
            loss_fn(model, rank, number).backward()
        optimizer.step()
    return optimizer


def how_close(model: nn.Module, reference: nn.Module) -> str:
    pairs = [(a.detach(), b.detach()) for a, b in zip(model.parameters(), reference.parameters(), strict=True)]
    if all(torch.equal(a, b) for a, b in pairs):
        return "equal"
    return f"off by {max(float((a - b).abs().max()) for a, b in pairs):.0e}"


def raised(kind: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)
