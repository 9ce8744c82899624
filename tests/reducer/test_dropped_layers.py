"""Layers that all ranks drop in a step: equal to `find_unused_parameters` of torch, without its messages."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddpobs import DistributedDataParallel, LayerDrop
from ddpobs.comm import AllReduce
from ddpobs.errors import ConfigError, ReducerError
from tests.support.distributed.compare import Case, batch, outcome, verdicts
from tests.support.distributed.dropping import Stack, draw
from tests.support.distributed.launch import run_ranks

LAYER_BUCKETS = {"bucket_cap_mb": 0.0002}
"""Each layer's weight and bias are a bucket."""
TWO_BUCKETS = {"bucket_cap_mb": 0.0009}
"""Dropped and kept layers share a bucket."""
STEPS = 8


def wrapped(kind: Any, module: nn.Module, **options: Any) -> Any:
    """Wrap it; torch's DDP has to find the unused parameters."""
    return kind(module, **options, **({"find_unused_parameters": True} if kind is TorchDDP else {}))


def train(ddp: Any, rank: int, steps: int = STEPS, set_to_none: bool = True, accumulate: int = 0) -> list[Any]:
    """Train with momentum: a parameter without a gradient stays where it is, one with a zero gradient moves on."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    results: list[Any] = []
    for step in range(steps):
        draw(ddp, step)
        optimizer.zero_grad(set_to_none=set_to_none)
        for part in range(accumulate):
            with ddp.no_sync():
                ddp(batch(rank, 100 * part + step)).pow(2).mean().backward()
        ddp(batch(rank, step)).pow(2).mean().backward()
        optimizer.step()
        results.append([outcome(ddp), [p.grad is None for p in ddp.parameters()]])
    return results


def whole_buckets(kind: Any, rank: int) -> Any:
    return train(wrapped(kind, Stack(), **LAYER_BUCKETS), rank)


def parts_of_buckets(kind: Any, rank: int) -> Any:
    return train(wrapped(kind, Stack(), **TWO_BUCKETS), rank)


def one_bucket(kind: Any, rank: int) -> Any:
    return train(wrapped(kind, Stack()), rank)


def accumulated(kind: Any, rank: int) -> Any:
    return train(wrapped(kind, Stack(), **LAYER_BUCKETS), rank, accumulate=2)


def gradients_stay(kind: Any, rank: int) -> Any:
    """Without zeroing by None, a dropped layer keeps its gradient of the step before, which is zero."""
    return train(wrapped(kind, Stack(), **LAYER_BUCKETS), rank, set_to_none=False)


def gradients_are_never_zeroed(kind: Any, rank: int) -> Any:
    ddp = wrapped(kind, Stack(), **TWO_BUCKETS)
    for step in range(STEPS):
        draw(ddp, step)
        ddp(batch(rank, step)).sum().backward()
    return outcome(ddp)


def views(kind: Any, rank: int) -> Any:
    return train(wrapped(kind, Stack(), gradient_as_bucket_view=True, **TWO_BUCKETS), rank)


def nearly_all_dropped(kind: Any, rank: int) -> Any:
    return train(wrapped(kind, Stack(probability=0.9), **LAYER_BUCKETS), rank)


class Shared(Stack):
    """A weight in two layers, and one that a layer shares with the rest of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].weight = self.layers[0].weight
        self.first.weight = self.layers[2].weight


def shared_weights(kind: Any, rank: int) -> Any:
    return train(wrapped(kind, Shared(), **LAYER_BUCKETS), rank)


class Nested(nn.Module):
    """A LayerDrop inside a layer of another one; both run by a call, and by slices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        inner = LayerDrop([nn.Linear(8, 8), nn.Linear(8, 8)], 0.4, seed=8)
        self.layers = LayerDrop([nn.Linear(8, 8), inner, nn.Tanh(), nn.Linear(8, 8)], 0.4, seed=9)
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:3]:
            x = layer(x)
        return self.last(self.layers[3:](x))  # type: ignore[no-any-return]


def nested(kind: Any, rank: int) -> Any:
    return train(wrapped(kind, Nested(), **LAYER_BUCKETS), rank)


def late_parameters(kind: Any, rank: int) -> Any:
    """Let a layer require gradients after wrapping: ours only."""
    return train(wrapped(kind, Stack(), **LAYER_BUCKETS), rank)


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        whole_buckets,
        parts_of_buckets,
        one_bucket,
        accumulated,
        gradients_stay,
        gradients_are_never_zeroed,
        views,
        nearly_all_dropped,
        shared_weights,
        nested,
    )
}


def compared(rank: int, world_size: int) -> dict[str, str]:
    return verdicts(CASES, rank)


@pytest.fixture(scope="module")
def verdicts_of_two() -> list[dict[str, str]]:
    return run_ranks(compared, 2)


@pytest.mark.parametrize("case", CASES)
def test_steps_equal_those_of_torch_that_finds_unused_parameters(
    verdicts_of_two: list[dict[str, str]], case: str
) -> None:
    assert {verdict[case] for verdict in verdicts_of_two} == {"equal"}
