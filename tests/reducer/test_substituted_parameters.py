"""`torch.func.functional_call` on the wrapped module, compared with torch's DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.distributed.compare import CAP, batch, net, outcome, train


def all_substituted(kind: Any, rank: int) -> Any:
    """Differentiate a loss of other parameters, between trainings of the module's own."""
    ddp, results = kind(net(), **CAP), []
    for step in range(3):
        substitutes = {name: p.detach().clone().requires_grad_() for name, p in ddp.named_parameters()}
        torch.func.functional_call(ddp, substitutes, batch(rank, step + 50)).sum().backward()
        results += [substitute.grad for substitute in substitutes.values()]
        results += train(ddp, rank, 1)
    return results


def before_the_modules_own(kind: Any, rank: int) -> Any:
    """Compute both losses first, and differentiate the loss of the module's own parameters last."""
    ddp = kind(net(), **CAP)
    substitutes = {name: p.detach().clone().requires_grad_() for name, p in ddp.named_parameters()}
    other = torch.func.functional_call(ddp, substitutes, batch(rank, 1)).sum()
    own = ddp(batch(rank)).sum()
    other.backward()
    own.backward()
    return outcome(ddp)


def some_substituted(kind: Any, rank: int) -> Any:
    """Substitute the last layer's parameters alone."""
    ddp, results = kind(net(), find_unused_parameters=True, **CAP), []
    for step in range(3):
        ddp.zero_grad()
        substitutes = {
            name: p.detach().clone().requires_grad_() for name, p in ddp.named_parameters() if "module.4" in name
        }
        torch.func.functional_call(ddp, substitutes, batch(rank, step)).sum().backward()
        results += [substitute.grad for substitute in substitutes.values()]
        results += outcome(ddp)
    return results


def fast_weights(kind: Any, rank: int) -> Any:
    """Differentiate through a step of gradient descent, as meta-learning does."""
    ddp, results = kind(net(), **CAP), []
    for step in range(3):
        ddp.zero_grad()
        parameters = dict(ddp.named_parameters())
        slopes = torch.autograd.grad(
            ddp.module(batch(rank, step)).pow(2).mean(), list(parameters.values()), create_graph=True
        )
        fast = {name: p - 0.1 * slope for (name, p), slope in zip(parameters.items(), slopes, strict=True)}
        torch.func.functional_call(ddp, fast, batch(rank, step + 50)).pow(2).mean().backward()
        results += outcome(ddp)
    return results


CASES = {
    "all substituted": all_substituted,
    "all substituted, and a loss of the module's own": before_the_modules_own,
    "some substituted": some_substituted,
    "fast weights": fast_weights,
}


@pytest.mark.parametrize("case", CASES)
def test_results_equal_those_of_torch(verdicts_by_rank: list[dict[str, str]], case: str) -> None:
    assert {verdict[case] for verdict in verdicts_by_rank} == {"equal"}
