"""Losses that train the DDP module inside a hook of an outer backward: steps, samples, spans and the slow rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddpobs import wire
from tests.support.distributed.cached_losses import ROWS, Encoder, batches, cached_loss
from tests.support.distributed.delays import durations, excess_ns, waited_ns
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.loops import ddp_factory, gaps_ns
from tests.support.distributed.sent import Sent, sending

pytestmark = pytest.mark.wide

SLOW_S = 0.16
"""Delay of rank 1 in each step, spread over its nested forwards."""
SLOW_NS = 160_000_000
STEPS, HABIT = 12, 8
"""Without a loader, eight steps pass before forwards without gradients count as part of a step."""
FEW = 5
CASES = [(passes, with_loader) for passes in (2, 4, 16) for with_loader in (True, False)]


def summary(capture: Sent) -> dict[str, Any]:
    spans = list(zip(capture.spans("step"), capture.spans("bucket"), capture.spans("done_ns"), strict=True))
    starts, ends = capture.steps("start_ns"), capture.steps("end_ns")
    return {
        "steps": capture.steps("step"),
        "samples": capture.steps("samples"),
        "backwards": capture.steps("micro_steps"),
        "collectives": capture.steps("collective"),
        "clean": [not flags & wire.NO_ORIGIN for flags in capture.steps("flags")],
        **durations(capture),
        "gaps": gaps_ns(capture),
        "wall": [end - start for start, end in zip(starts, ends, strict=True)],
        "spans": [[bucket for number, bucket, _ in spans if number == step] for step in capture.steps("step")],
        "inside": all(starts[number] <= done <= ends[number] for number, _, done in spans),
        "buckets": len(capture.layouts[-1].buckets),
    }


def cached_trainings(rank: int, world_size: int, kind: str) -> dict[tuple[int, bool], Any]:
    results = {}
    for passes, with_loader in CASES:
        with sending() as capture:
            encoder = Encoder(SLOW_S / passes if rank == 1 else 0.0)
            ddp = ddp_factory(kind, capture)(encoder, bucket_cap_mb=0.001)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
            for columns in batches(STEPS, with_loader):
                optimizer.zero_grad()
                cached_loss([ddp, ddp], columns, 2 * ROWS // passes).backward()
                optimizer.step()
        results[passes, with_loader] = summary(capture)
    return results


@pytest.fixture(scope="module", params=["ours", "attached"])
def trainings(request: pytest.FixtureRequest) -> list[dict[tuple[int, bool], Any]]:
    return run_ranks(cached_trainings, 2, request.param)


@pytest.mark.parametrize("case", CASES)
def test_an_optimizer_step_is_a_step_with_every_nested_sample(trainings: Any, case: tuple[int, bool]) -> None:
    for rank in trainings:
        training = rank[case]
        assert training["steps"] == list(range(STEPS))
        assert training["samples"] == [2 * ROWS] * STEPS
        assert training["collectives"] == [case[0] * (step + 1) - 1 for step in range(STEPS)]
        assert training["backwards"][1:] == [case[0] + 2] * (STEPS - 1)
        assert [sum(phases.values()) for phases in training["phases"]] == training["wall"]


@pytest.mark.parametrize("case", CASES)
def test_every_nested_synchronisation_has_its_bucket_spans(trainings: Any, case: tuple[int, bool]) -> None:
    for rank in trainings:
        training = rank[case]
        assert training["inside"]
        assert training["buckets"] > 1
        for buckets in training["spans"][1:]:
            assert sorted(buckets) == sorted(list(range(training["buckets"])) * case[0])


@pytest.mark.parametrize("case", CASES)
def test_the_slow_rank_has_its_delay_in_own_time_and_the_other_rank_has_none(
    trainings: Any, case: tuple[int, bool]
) -> None:
    fast, slow = (rank[case] for rank in trainings)
    since = 1 if case[1] else HABIT + 1
    for training in (fast, slow):
        assert training["clean"] == [False] * since + [True] * (STEPS - since)
    delay_ns = 0.8 * SLOW_NS * (STEPS - since)
    assert min(own["forward"] for own in slow["own"][since:]) >= SLOW_NS
    assert excess_ns(slow, fast, *wire.OWN_PHASES, since=since) > delay_ns
    assert waited_ns(fast, since) > delay_ns


# ---------------------------------------------------------------------- other trainings with nested passes


class Checkpointed(nn.Module):
    """Checkpoints a whole DDP module if gradients are enabled."""

    def __init__(self, ddp: Any, reentrant: bool) -> None:
        super().__init__()
        self.ddp, self.reentrant = ddp, reentrant

    def forward(self, x: torch.Tensor) -> Any:
        if not torch.is_grad_enabled():
            return self.ddp(x)
        return checkpoint(self.ddp, x.detach().requires_grad_(), use_reentrant=self.reentrant)


def train(encoders: list[Any], with_loader: bool, step: Callable[..., Any]) -> None:
    optimizer = torch.optim.SGD([p for encoder in encoders for p in encoder.parameters()], lr=0.01)
    for columns in batches(FEW, with_loader):
        optimizer.zero_grad()
        step(columns)
        optimizer.step()


def last_pass_synchronises(wrap: Any, with_loader: bool) -> None:
    ddp = wrap(Encoder())
    train([ddp], with_loader, lambda columns: cached_loss([ddp, ddp], columns, 4, last_alone=True).backward())


def encoder_for_each_column(wrap: Any, with_loader: bool) -> None:
    encoders = [wrap(Encoder()), wrap(Encoder())]
    train(encoders, with_loader, lambda columns: cached_loss(encoders, columns, 8).backward())


def without_optimizer(wrap: Any, with_loader: bool) -> None:
    ddp = wrap(Encoder())
    for columns in batches(FEW, with_loader):
        cached_loss([ddp, ddp], columns, 8).backward()


def checkpointed_pass(wrap: Any, with_loader: bool) -> None:
    ddp = wrap(Encoder())
    encoder = Checkpointed(ddp, reentrant=False)
    train([ddp], with_loader, lambda columns: cached_loss([encoder, encoder], columns, 8).backward())


def outer_gradient_alone(wrap: Any, with_loader: bool) -> None:
    """The outer backward is `torch.autograd.grad`, which is not recorded."""
    ddp = wrap(Encoder())

    def step(columns: Any) -> None:
        loss = cached_loss([ddp, ddp], columns, 8)
        torch.autograd.grad(loss * 1, [loss])

    train([ddp], with_loader, step)


def reentrant_checkpoint(wrap: Any, with_loader: bool) -> None:
    ddp = wrap(Encoder())
    encoder = Checkpointed(ddp, reentrant=True)
    train([ddp], with_loader, lambda columns: sum(encoder(x).sum() for x in columns).backward())


class InnerCheckpoint(Encoder):
    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=True)


def checkpoint_in_checkpoint(wrap: Any, with_loader: bool) -> None:
    """A reentrant backward follows a repeated forward that was recorded before."""
    ddp = wrap(InnerCheckpoint())
    encoder = Checkpointed(ddp, reentrant=False)
    train([ddp], with_loader, lambda columns: encoder(torch.cat(columns)).sum().backward())


def evaluation_between(wrap: Any, with_loader: bool) -> None:
    """An evaluation that sleeps comes before each step but the first."""
    ddp = wrap(Encoder())

    def step(columns: Any) -> None:
        cached_loss([ddp, ddp], columns, 8).backward()

    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for _ in range(FEW):
        ddp.train()
        for columns in batches(1, with_loader):
            optimizer.zero_grad()
            step(columns)
            optimizer.step()
        ddp.eval()
        with torch.no_grad():
            for first, _ in batches(1, with_loader):
                ddp(first)
                time.sleep(SLOW_S)


def closure(wrap: Any, with_loader: bool) -> None:
    """The optimizer calls a closure with the loss twice a step."""
    ddp = wrap(Encoder())
    optimizer = torch.optim.LBFGS(ddp.parameters(), max_iter=2, lr=1e-3)
    for columns in batches(FEW, with_loader):

        def evaluate(columns: Any = columns) -> torch.Tensor:
            optimizer.zero_grad()
            loss = cached_loss([ddp, ddp], columns, 8)
            loss.backward()
            return loss

        optimizer.step(evaluate)


def failed_pass(wrap: Any, with_loader: bool) -> None:
    """The third loss fails in its first nested backward, on every rank, before any gradient of the module."""
    ddp = wrap(Encoder())

    def failing(x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = ddp(x)
        if output.requires_grad:
            output.register_hook(lambda _: 1 / 0)
        return output

    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for number, columns in enumerate(batches(FEW, with_loader)):
        optimizer.zero_grad()
        try:
            cached_loss([failing if number == 2 else ddp, ddp], columns, 8).backward()
        except ZeroDivisionError:
            continue
        optimizer.step()


OTHERS: dict[str, Callable[[Any, bool], None]] = {
    training.__name__: training
    for training in (
        last_pass_synchronises,
        encoder_for_each_column,
        without_optimizer,
        checkpointed_pass,
        outer_gradient_alone,
        reentrant_checkpoint,
        checkpoint_in_checkpoint,
        evaluation_between,
        closure,
        failed_pass,
    )
}
SYNCHRONISATIONS = dict.fromkeys(OTHERS, 4) | {
    "last_pass_synchronises": 2,
    "reentrant_checkpoint": 2,
    "checkpoint_in_checkpoint": 1,
    "closure": 8,
}


def other_trainings(rank: int, world_size: int, kind: str) -> dict[tuple[str, bool], Any]:
    results = {}
    for name, training in OTHERS.items():
        for with_loader in (True, False):
            with sending() as capture:
                training(ddp_factory(kind, capture), with_loader)
            results[name, with_loader] = summary(capture)
    return results


@pytest.fixture(scope="module", params=["ours", "attached"])
def others(request: pytest.FixtureRequest) -> dict[tuple[str, bool], Any]:
    return run_ranks(other_trainings, 2, request.param)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("with_loader", [True, False])
@pytest.mark.parametrize("name", OTHERS)
def test_other_trainings_with_nested_passes_have_their_steps(others: Any, name: str, with_loader: bool) -> None:
    training, passes = others[name, with_loader], SYNCHRONISATIONS[name]
    steps = FEW - (name == "failed_pass")  # The failed step joins the next one.
    assert training["steps"] == list(range(steps))
    assert training["collectives"] == [passes * (step + 1) - 1 for step in range(steps)]
    assert [len(buckets) for buckets in training["spans"]] == [passes * training["buckets"]] * steps
    assert [sum(phases.values()) for phases in training["phases"]] == training["wall"]
    if name == "failed_pass":
        assert training["samples"] == [2 * ROWS] * 2 + [2 * ROWS + ROWS // 2, 2 * ROWS]
    else:
        assert training["samples"] == [2 * ROWS * (1 + (name == "closure"))] * steps
    if name == "evaluation_between":
        assert min(training["gaps"]) >= SLOW_NS
    if name == "reentrant_checkpoint":
        assert all(phases["forward"] == 0 for phases in training["phases"])
