"""Forwards in Horovod's telemetry: each is recorded once, and the model stays unchanged."""

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
from tests.support.distributed.compare import batch, net
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import Sent, sending

ROWS = len(batch(0))
STEPS = 3


class Block(nn.Module):
    """A separate class, so that its wrapped methods are visible."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x))


class Wider(Block):
    """Inherits a method that is wrapped for `Block`."""


class Calling(Block):
    """A class with its own `__call__`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


def distributed(parameters: Any, records: Sent) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.01), telemetry=records.config)


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
    with sending() as records:
        optimizer = distributed(model.parameters(), records)
        train(rank, model, optimizer)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = [torch.load(file, weights_only=False), deepcopy(model), torch.jit.script(model)]
        train(rank, lambda x: model(x) - sum(other(x).detach() for other in copies), optimizer)
    return records, len(model._forward_pre_hooks)


def test_forwards_of_saved_copied_and_scripted_models_are_not_counted() -> None:
    for records, hooks in run_ranks(used_otherwise, 2):
        assert records.steps("samples") == [ROWS] * 2 * STEPS
        assert hooks == 0


def in_parts(rank: int, ranks: int) -> Sent:
    hvd.init()
    model = net()
    with sending() as records:
        parts = [distributed(model[layer].parameters(), records) for layer in (0, 2, 4)]
        train(rank, model, *parts)
        parts[0]._reducer.remove_hooks()
        del parts[0]
        gc.collect()
        train(rank, model, *parts)
    return records


def test_a_forward_counts_once_with_several_optimizers() -> None:
    for records in run_ranks(in_parts, 2):
        assert records.steps("samples") == [ROWS] * 2 * STEPS


def replaced(rank: int, ranks: int) -> Sent:
    hvd.init()
    model = net()
    with sending() as records:
        for _ in range(2):
            optimizer = distributed(model.parameters(), records)
            with torch.no_grad():
                model(batch(rank))
            train(rank, model, optimizer)
            optimizer._reducer.remove_hooks()
            del optimizer
            gc.collect()
    return records


def test_a_model_with_a_new_optimizer_is_still_the_only_one() -> None:
    # With several models, a model in training mode may run without gradients as part of a step.
    for records in run_ranks(replaced, 2):
        assert records.steps("samples") == [ROWS] * 2 * STEPS


def scripted(model: Any) -> Any:
    return (torch.jit.script(model),) * 2


def compiled(model: Any) -> Any:
    return model, torch.compile(model, backend="eager", fullgraph=True)


def compiled_and_called_itself(model: Any) -> Any:
    """Call the model itself first, and its compiled form afterwards."""
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    calls = count()
    return model, lambda x: compiled(x) if next(calls) else model(x)


def compiled_in_place(model: Any) -> Any:
    model.compile(backend="eager", fullgraph=True)
    return model, model


def with_a_call_of_its_own(_model: Any) -> Any:
    return (Calling(),) * 2


BUILDS = [scripted, compiled, compiled_and_called_itself, compiled_in_place, with_a_call_of_its_own]


def called(rank: int, ranks: int, build: Callable[[nn.Module], Any]) -> Sent:
    hvd.init()
    model, call = build(Block())
    with sending() as records:
        train(rank, call, distributed(model.parameters(), records))
    return records


@pytest.mark.parametrize("build", BUILDS)
def test_forwards_are_recorded_however_the_model_is_called(build: Callable[[nn.Module], Any]) -> None:
    (records,) = run_ranks(called, 1, build)
    assert records.steps("samples") == [ROWS] * STEPS


def of_one_family(rank: int, ranks: int) -> Any:
    hvd.init()
    first, second = Block(), Wider()
    plain = dict(vars(Block)), dict(vars(Wider))
    with sending() as records:
        optimizers = [distributed(model.parameters(), records) for model in (second, first)]
        train(rank, lambda x: second(first(x=first(x))), *optimizers)
        for optimizer in optimizers:
            optimizer._reducer.remove_hooks()
        del optimizer, optimizers
        gc.collect()
        hooks_left = len(torch.nn.modules.module._global_forward_pre_hooks)
    return records, plain == (dict(vars(Block)), dict(vars(Wider))), hooks_left


def test_models_of_related_classes_count_once_and_nothing_stays_wrapped() -> None:
    ((records, as_before, hooks_left),) = run_ranks(of_one_family, 1)
    # Keyword arguments are recorded once the model is known, which is after its first forward.
    assert records.steps("samples") == [3 * ROWS] * STEPS
    assert as_before
    assert hooks_left == 0


def never_called(rank: int, ranks: int) -> tuple[int, int]:
    hvd.init()
    with sending() as records:
        optimizer = distributed(Block().parameters(), records)
        optimizer._reducer.remove_hooks()
        del optimizer
        gc.collect()
        hooks = torch.nn.modules.module._global_forward_pre_hooks
        left_by_collection = len(hooks)  # Torch may be iterating over the hooks while garbage is collected.
        nn.Linear(1, 1)(torch.ones(1, 1))
        return left_by_collection, len(hooks)


def test_the_hook_of_an_optimizer_whose_model_was_never_called_goes_at_the_next_forward_of_any_module() -> None:
    assert run_ranks(never_called, 1) == [(1, 0)]
