"""A rank that runs other layers than the ranks have drawn: every rank gets the same error, and none hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpobs import DistributedDataParallel
from ddpobs.errors import ModelsDifferError, ReducerError, UnusedParametersError
from tests.support.distributed.compare import batch, outcome
from tests.support.distributed.dropping import Stack
from tests.support.distributed.launch import run_ranks

CAP: dict[str, Any] = {"bucket_cap_mb": 0.0002}
STEP = 2
"""The step of the mistake. It drops some layers, and keeps others."""


def wrapped(**options: Any) -> Any:
    return DistributedDataParallel(Stack(**options), **CAP)


def after_steps(rank: int, **options: Any) -> Any:
    """A model after the steps before the mistake."""
    ddp = wrapped(**options)
    for step in range(STEP):
        ddp.zero_grad()
        ddp(batch(rank, step)).sum().backward()
    return ddp


def runs_a_dropped_layer(rank: int) -> Any:
    ddp = after_steps(rank)
    also = min(ddp.module.layers.dropped_in(STEP)) if rank == 1 else None
    ddp(batch(rank), also).sum().backward()
    return ddp


def runs_it_under_no_sync(rank: int) -> Any:
    ddp = after_steps(rank)
    with ddp.no_sync():
        ddp(batch(rank), min(ddp.module.layers.dropped_in(STEP)) if rank == 1 else None).sum().backward()
    ddp(batch(rank)).sum().backward()
    return ddp


def runs_every_layer(rank: int) -> Any:
    ddp = after_steps(rank)
    ddp.train(rank == 0)
    ddp(batch(rank)).sum().backward()
    return ddp.train()


def drops_another_layer(rank: int) -> Any:
    """Rank 1 draws once more inside of the forward: it lacks a kept layer, and runs a dropped one."""
    ddp = after_steps(rank)
    if rank == 1:
        ddp.module.first.register_forward_hook(lambda *_: ddp.module.layers.draw(STEP + 5))
    ddp(batch(rank)).sum().backward()
    return ddp


def drops_more(rank: int) -> Any:
    ddp = after_steps(rank)
    kept = min(set(range(5)) - ddp.module.layers.dropped_in(STEP))
    if rank == 1:
        ddp.module.layers[kept].forward = torch.zeros_like
    ddp(batch(rank)).sum().backward()
    return ddp


def has_another_seed(rank: int) -> Any:
    return after_steps(rank, seed=rank)


def calls_an_older_backward(rank: int) -> Any:
    ddp = after_steps(rank)
    losses = [ddp(batch(rank)).sum() for _ in range(2)]
    for loss in losses:
        loss.backward()
    return ddp


MISTAKES: dict[str, Callable[[int], Any]] = {
    mistake.__name__: mistake
    for mistake in (
        runs_a_dropped_layer,
        runs_it_under_no_sync,
        runs_every_layer,
        drops_another_layer,
        drops_more,
        has_another_seed,
        calls_an_older_backward,
    )
}


def errors(rank: int, world_size: int) -> dict[str, str]:
    by_mistake = {}
    for name, mistake in MISTAKES.items():
        dist.barrier()
        try:
            mistake(rank)
            by_mistake[name] = "no error"
        except ReducerError as error:
            by_mistake[name] = f"{type(error).__name__}: {error}"
    return by_mistake


@pytest.fixture(scope="module")
def errors_by_rank() -> list[dict[str, str]]:
    return run_ranks(errors, 2)


DROPPED, KEPT = min(Stack().layers.dropped_in(STEP)), min(set(range(5)) - Stack().layers.dropped_in(STEP))


@pytest.mark.parametrize(
    ("mistake", "kind", "text"),
    [
        ("runs_a_dropped_layer", ReducerError, f"rank 1: layers.{DROPPED}."),
        ("runs_it_under_no_sync", ReducerError, f"rank 1: layers.{DROPPED}."),
        ("runs_every_layer", ReducerError, f"rank 1: layers.{DROPPED}."),
        ("drops_another_layer", ReducerError, "rank 1: layers."),
        ("drops_more", UnusedParametersError, f"layers.{KEPT}.weight (rank 1)"),
        ("has_another_seed", ModelsDifferError, "seed 0 on rank 0 but layers: probability 0.5, seed 1 on rank 1"),
        ("calls_an_older_backward", ReducerError, "rank 0: layers."),
    ],
)
def test_every_rank_gets_the_same_error_with_parameters_and_ranks(
    errors_by_rank: list[dict[str, str]], mistake: str, kind: type[ReducerError], text: str
) -> None:
    first, second = (answers[mistake] for answers in errors_by_rank)
    assert first == second
    assert first.startswith(f"{kind.__name__}: ")
    assert text in first


def train_on(rank: int, world_size: int) -> list[Any]:
    """Drop the batch of the mistake, and train further."""
    ddp = after_steps(rank)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(STEP, 8):
        optimizer.zero_grad()
        also = min(ddp.module.layers.dropped_in(step)) if (rank, step) == (1, STEP) else None
        try:
            ddp(batch(rank, step), also).sum().backward()
            optimizer.step()
        except ReducerError:
            assert step == STEP
    return [tensor.tolist() for tensor in outcome(ddp)]


def test_the_batch_can_be_dropped() -> None:
    first, second = run_ranks(train_on, 2)
    assert first == second
