"""Forwards as Horovod's telemetry sees them: each once, with nothing left on the model."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable
from copy import deepcopy
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

import ddpobs.horovod as hvd
from tests.distributed.compare import batch, net
from tests.distributed.launch import run_ranks
from tests.distributed.sent import Sent, sending

ROWS = len(batch(0))
STEPS = 3


class Block(nn.Module):
    """A class of its own, in which one can see what was wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x))


class Wider(Block):
    """What is wrapped for a `Block` is inherited."""


class Calling(Block):
    """It has a call of its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


def distributed(parameters: Any, told: Sent) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.01), telemetry=told.config)


def train(rank: int, call: Callable[[torch.Tensor], torch.Tensor], *optimizers: Any) -> None:
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        call(batch(rank, step)).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def used_otherwise(rank: int, ranks: int) -> Any:
    hvd.init()
    model = net()
    with sending() as told:
        optimizer = distributed(model.parameters(), told)
        train(rank, model, optimizer)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        others = [torch.load(file, weights_only=False), deepcopy(model), torch.jit.script(model)]
        train(rank, lambda x: model(x) - sum(other(x).detach() for other in others), optimizer)
    return told, len(model._forward_pre_hooks)


def test_a_model_is_saved_copied_and_scripted_and_its_copies_are_not_counted() -> None:
    for told, hooks in run_ranks(used_otherwise, 2):
        assert told.steps("samples") == [ROWS] * 2 * STEPS
        assert hooks == 0


def in_parts(rank: int, ranks: int) -> Sent:
    hvd.init()
    model = net()
    with sending() as told:
        parts = [distributed(model[place].parameters(), told) for place in (0, 2, 4)]  # type: ignore[index]
        train(rank, model, *parts)
        parts[0]._reducer.remove_hooks()
        del parts[0]
        gc.collect()
        train(rank, model, *parts)
    return told


def test_a_forward_counts_once_however_many_optimizers_there_are() -> None:
    for told in run_ranks(in_parts, 2):
        assert told.steps("samples") == [ROWS] * 2 * STEPS


def replaced(rank: int, ranks: int) -> Sent:
    hvd.init()
    model = net()
    with sending() as told:
        for _ in range(2):
            optimizer = distributed(model.parameters(), told)
            with torch.no_grad():
                model(batch(rank))
            train(rank, model, optimizer)
            optimizer._reducer.remove_hooks()
            del optimizer
            gc.collect()
    return told


def test_a_model_with_a_new_optimizer_is_still_the_only_one() -> None:
    # Of several models, one that is in training mode may run without gradients as part of a step.
    for told in run_ranks(replaced, 2):
        assert told.steps("samples") == [ROWS] * 2 * STEPS


def scripted(model: Any) -> Any:
    return (torch.jit.script(model),) * 2


def compiled(model: Any) -> Any:
    return model, torch.compile(model, backend="eager", fullgraph=True)


def compiled_and_called_itself(model: Any) -> Any:
    """The first call is not of what is compiled."""
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    calls = count()
    return model, lambda x: compiled(x) if next(calls) else model(x)


def compiled_in_place(model: Any) -> Any:
    model.compile(backend="eager", fullgraph=True)
    return model, model


def with_a_call_of_its_own(_model: Any) -> Any:
    return (Calling(),) * 2


WAYS = [scripted, compiled, compiled_and_called_itself, compiled_in_place, with_a_call_of_its_own]


def called(rank: int, ranks: int, way: Callable[[nn.Module], Any]) -> Sent:
    hvd.init()
    model, call = way(Block())
    with sending() as told:
        train(rank, call, distributed(model.parameters(), told))
    return told


@pytest.mark.parametrize("way", WAYS)
def test_forwards_are_seen_however_the_model_is_called(way: Callable[[nn.Module], Any]) -> None:
    (told,) = run_ranks(called, 1, way)
    assert told.steps("samples") == [ROWS] * STEPS


def of_one_family(rank: int, ranks: int) -> Any:
    hvd.init()
    first, second = Block(), Wider()
    plain = dict(vars(Block)), dict(vars(Wider))
    with sending() as told:
        optimizers = [distributed(model.parameters(), told) for model in (second, first)]
        train(rank, lambda x: second(first(x=first(x))), *optimizers)
        for optimizer in optimizers:
            optimizer._reducer.remove_hooks()
        del optimizer, optimizers
        gc.collect()
        left = len(torch.nn.modules.module._global_forward_pre_hooks)
    return told, plain == (dict(vars(Block)), dict(vars(Wider))), left


def test_each_model_of_a_family_of_classes_counts_once_and_nothing_stays_wrapped() -> None:
    ((told, as_before, left),) = run_ranks(of_one_family, 1)
    # Keyword arguments are shown once the model is found, which its first forward did.
    assert told.steps("samples") == [3 * ROWS] * STEPS
    assert as_before
    assert left == 0


def never_called(rank: int, ranks: int) -> int:
    hvd.init()
    with sending() as told:
        optimizer = distributed(Block().parameters(), told)
        optimizer._reducer.remove_hooks()
        del optimizer
        gc.collect()
        return len(torch.nn.modules.module._global_forward_pre_hooks)


def test_an_optimizer_whose_model_was_never_called_leaves_no_hook() -> None:
    assert run_ranks(never_called, 1) == [0]
