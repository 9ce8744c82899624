"""Optimizer steps on gradients that were never reduced, on our DDP and on torch's with telemetry attached."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer

from tests.support.distributed.compare import batch
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.unreduced import Training, events_of

STEPS = 5


# ------------------------------------------------------------------ replicas part


def off_by_one(training: Training) -> None:
    for index in range(4 * STEPS):
        with training.ddp.no_sync() if index % 4 else nullcontext():
            training.loss(index).backward()
        if index % 4 == 3:
            training.step()


def flag_between(training: Training) -> None:
    for index in range(STEPS):
        training.ddp.require_backward_grad_sync = False
        loss = training.loss(index)
        training.ddp.require_backward_grad_sync = True
        loss.backward()
        training.step()


def no_sync_around(training: Training) -> None:
    with training.ddp.no_sync():
        for index in range(STEPS):
            training.loss(index).backward()
            training.step()


def wrapped_module(training: Training) -> None:
    for index in range(STEPS):
        training.loss(index, training.ddp.module).backward()
        training.step()


def delegating(training: Training) -> None:
    class Delegate(nn.Module):
        def __init__(self, ddp: nn.Module) -> None:
            super().__init__()
            self.ddp = ddp

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.ddp.module(x)  # type: ignore[no-any-return,operator]

    for index in range(STEPS):
        training.loss(index, Delegate(training.ddp)).backward()
        training.step()


def closures(training: Training) -> None:
    def closure() -> torch.Tensor:
        training.optimizer.zero_grad()
        loss = training.loss(0, training.ddp.module)
        loss.backward()
        return loss

    for _ in range(STEPS):
        training.optimizer.step(closure)


def logged_loss(training: Training) -> None:
    for index in range(STEPS):
        loss = training.loss(index, training.ddp.module)
        loss.backward()
        dist.all_reduce(loss.detach().clone())
        training.step()


def sometimes(training: Training) -> None:
    """Every third step goes past the DDP module."""
    for index in range(2 * STEPS):
        training.loss(index, training.ddp.module if index % 3 == 2 else None).backward()
        training.step()


def unfrozen(training: Training) -> None:
    for index in range(STEPS):
        if index == 2:
            training.model[0].requires_grad_(True)
        training.loss(index).backward()
        training.step()


def static_graph_bypassed(training: Training) -> None:
    for index in range(STEPS):
        training.loss(index, training.ddp.module if index > 2 else None).backward()
        training.step()


APART: dict[str, tuple[Callable[[Training], None], str, bool, dict[str, Any]]] = {
    "off by one": (off_by_one, "unsynchronised", False, {}),
    "flag between": (flag_between, "unsynchronised", True, {}),
    "no_sync around": (no_sync_around, "unsynchronised", True, {}),
    "wrapped module": (wrapped_module, "bypassed", True, {}),
    "delegating": (delegating, "bypassed", True, {}),
    "closures": (closures, "bypassed", True, {}),
    "logged loss": (logged_loss, "bypassed", True, {}),
    "sometimes": (sometimes, "bypassed", False, {}),
    "static graph": (static_graph_bypassed, "bypassed", False, {"static_graph": True}),
    "find unused": (off_by_one, "unsynchronised", False, {"find_unused_parameters": True}),
}
"""Training, expected reason, whether nothing is ever synchronised, options of DDP."""


def apart(rank: int, world_size: int, kind: str) -> dict[str, list[Any]]:
    warnings.simplefilter("ignore")
    return {name: events_of(case, kind, rank, **options) for name, (case, _, _, options) in APART.items()}


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_a_step_on_gradients_that_were_not_reduced_is_an_event(kind: str) -> None:
    for by_case in run_ranks(apart, 2, kind):
        for name, (_, reason, never, _) in APART.items():
            (first, *rest) = by_case[name]
            assert first[:2] == ("not_reduced", reason), name
            assert first[2] == "0.weight, 0.bias, 2.weight, 2.bias, 4.weight, 4.bias"
            assert first[3] == 6
            assert [event[0] for event in rest] == ["never_synchronised"] * never, name
            assert all(event[4]["optimizer_steps"] == STEPS for event in rest)


def unfreezing(rank: int, world_size: int, kind: str) -> list[Any]:
    return events_of(unfrozen, kind, rank, frozen=True)


def test_an_unfrozen_parameter_that_torch_does_not_reduce_is_an_event() -> None:
    for events in run_ranks(unfreezing, 2, "torch"):
        ((_, reason, names, count, detail),) = events
        assert (reason, names, count, detail["optimizer_steps"]) == ("unfrozen", "0.weight, 0.bias", 2, 3)
    for events in run_ranks(unfreezing, 2, "ours"):
        assert events == []


# ------------------------------------------------------------------ replicas stay alike


def plain(training: Training) -> None:
    for index in range(STEPS):
        training.loss(index).backward()
        training.step()


def accumulation(training: Training) -> None:
    for index in range(4 * STEPS + 2):  # The last two are left over.
        with training.ddp.no_sync() if index % 4 != 3 else nullcontext():
            training.loss(index).backward()
        if index % 4 == 3:
            training.step()


def reduction_by_hand(training: Training) -> None:
    for index in range(STEPS):
        training.loss(index, training.ddp.module).backward()
        for parameter in training.model.parameters():
            dist.all_reduce(parameter.grad)
        training.step()


def averaged(training: Training) -> None:
    """Local SGD: the ranks train apart for four steps on purpose."""
    for index in range(4 * STEPS):
        with training.ddp.no_sync():
            training.loss(index).backward()
        training.step()
        if index % 4 == 3:
            for parameter in training.model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data.div_(2)


def flat_reduction_by_hand(training: Training) -> None:
    for index in range(STEPS):
        with training.ddp.no_sync():
            training.loss(index).backward()
        gradients = [parameter.grad for parameter in training.model.parameters()]
        flat = torch.cat([gradient.flatten() for gradient in gradients]).half()
        dist.all_reduce(flat, op=dist.ReduceOp.SUM)
        training.step()


def reduction_in_hooks(training: Training) -> None:
    def reduce(gradient: torch.Tensor) -> torch.Tensor:
        summed = gradient.clone()
        dist.all_reduce(summed)
        return summed

    for parameter in training.model.parameters():
        parameter.register_hook(reduce)
    wrapped_module(training)


def outside_parameters(training: Training) -> None:
    """The optimizer steps on a temperature that only this rank has, while the module's gradients are local."""
    temperature = nn.Parameter(torch.ones(()))
    other = torch.optim.SGD([temperature], lr=0.1)
    for index in range(STEPS):
        with training.ddp.no_sync():
            (training.loss(index) * temperature).backward()
        other.step()
        training.loss(index).backward()
        training.step()


def local_gradients_dropped(training: Training) -> None:
    """A backward of the wrapped module serves an analysis; its gradients never reach the optimizer."""
    for index in range(STEPS):
        training.loss(index, training.ddp.module).backward()
        training.optimizer.zero_grad()
        training.loss(index).backward()
        training.step()


def generator_and_discriminator(training: Training) -> None:
    """The generator's step leaves local gradients in the discriminator, whose own step drops them."""
    discriminator = training.wrap(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)))
    second = torch.optim.SGD(discriminator.parameters(), lr=0.05)
    for index in range(STEPS):
        discriminator.module(training.ddp(batch(training.rank, index))).mean().backward()
        training.step()
        second.zero_grad()
        discriminator(training.ddp(batch(training.rank, index)).detach()).pow(2).mean().backward()
        second.step()


def scaler(training: Training) -> None:
    gradients = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for index in range(STEPS):
        training.optimizer.zero_grad()
        gradients.scale(training.loss(index) * (float("inf") if index == 2 else 1)).backward()
        gradients.step(training.optimizer)
        gradients.update()


def zero_optimizer(training: Training) -> None:
    training.optimizer = ZeroRedundancyOptimizer(training.model.parameters(), torch.optim.SGD, lr=0.05)
    accumulation(training)


def post_local_sgd(training: Training) -> None:
    state = post_localSGD_hook.PostLocalSGDState(None, dist.new_subgroups(1)[0], start_localSGD_iter=2)
    training.ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    plain(training)


def uneven(training: Training) -> None:
    with training.ddp.join():
        for index in range(STEPS + 3 * training.rank):
            training.loss(index).backward()
            training.step()


def evaluation(training: Training) -> None:
    for index in range(STEPS):
        training.loss(index).backward()
        training.step()
        with torch.no_grad():
            training.loss(index, training.ddp.module)
        training.loss(index, training.ddp.module)


def lbfgs(training: Training) -> None:
    training.optimizer = torch.optim.LBFGS(training.model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        training.optimizer.zero_grad()
        loss = training.loss(0)
        loss.backward()
        return loss

    for _ in range(STEPS):
        training.optimizer.step(closure)


def shared_layer(training: Training) -> None:
    """Another DDP module holds the same layer, and is not called."""
    other = training.wrap(nn.Sequential(training.model[4], nn.Tanh()))
    for index in range(STEPS):
        if index == 0:
            other(torch.ones(2, training.model[4].in_features)).mean().backward()
            training.optimizer.zero_grad()
        training.loss(index).backward()
        training.step()


ALIKE: dict[str, tuple[Callable[[Training], None], dict[str, Any]]] = {
    "plain": (plain, {}),
    "accumulation": (accumulation, {}),
    "accumulation with find unused": (accumulation, {"find_unused_parameters": True}),
    "by hand": (reduction_by_hand, {}),
    "by hand, flat": (flat_reduction_by_hand, {}),
    "by hand, in hooks": (reduction_in_hooks, {}),
    "averaged": (averaged, {}),
    "outside parameters": (outside_parameters, {}),
    "dropped": (local_gradients_dropped, {}),
    "two networks": (generator_and_discriminator, {}),
    "scaler": (scaler, {}),
    "zero": (zero_optimizer, {}),
    "local SGD": (post_local_sgd, {}),
    "uneven": (uneven, {}),
    "evaluation": (evaluation, {}),
    "lbfgs": (lbfgs, {}),
    "shared layer": (shared_layer, {}),
    "static graph": (plain, {"static_graph": True}),
    "views": (accumulation, {"gradient_as_bucket_view": True}),
}
BY_HAND = {"by hand": 1, "by hand, flat": 1, "by hand, in hooks": 1, "averaged": 4}
"""Optimizer steps from one exchange of the script's own to the next."""


def alike(rank: int, world_size: int, kind: str) -> dict[str, list[Any]]:
    warnings.simplefilter("ignore")
    return {name: events_of(case, kind, rank, **options) for name, (case, options) in ALIKE.items()}


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_no_event_where_the_replicas_stay_alike(kind: str) -> None:
    for by_case in run_ranks(alike, 2, kind):
        wrong = {name: events for name, events in by_case.items() if events and name not in BY_HAND}
        assert wrong == {}
        for name, every in BY_HAND.items():  # The module itself never synchronised.
            assert {event[0] for event in by_case[name]} == {"exchanged"}, name
            facts = by_case[name][-1][4]
            assert (facts["every"], facts["optimizer_steps"]) == (every, 4 * STEPS if every > 1 else STEPS), name


def one_rank(rank: int, world_size: int) -> list[Any]:
    return events_of(wrapped_module, "ours", rank)


def test_a_single_rank_cannot_part() -> None:
    assert run_ranks(one_rank, 1) == [[]]
