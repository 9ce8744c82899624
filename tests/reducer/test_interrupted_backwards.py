"""An error interrupts a backward, on one rank or on all: the batch can be dropped, and no rank hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddpobs import DistributedDataParallel, attach
from ddpobs.errors import ReducerError
from tests.support.distributed.compare import CAP, batch, grad, net, train, verdicts
from tests.support.distributed.interrupts import StopError, make_interruptible
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import sending

STEPS = 6
FailsAt = Callable[[int, int], bool]
"""Whether the backward of this rank and step fails."""
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flag": {"find_unused_parameters": True},
    "skipped": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "hook": {},
}


def on_every_rank(_rank: int, step: int) -> bool:
    return step in {0, 3}


def on_one_rank(rank: int, step: int) -> bool:
    return rank == 1 and step in {0, 3}


def train_and_drop(ddp: Any, rank: int, layer: int, fails_at: FailsAt, set_to_none: bool) -> dict[str, Any]:
    """Train, and drop the batches with a failed backward.

    Returns:
        The largest difference from a training without DDP, and the messages of the errors.
    """
    fails, plain = make_interruptible(ddp, layer), net()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (ddp, plain)]
    ranks = dist.get_world_size()
    messages, difference = [], 0.0
    for step in range(STEPS):
        fails[0] = fails_at(rank, step)
        optimizers[0].zero_grad(set_to_none=set_to_none)
        try:
            ddp(batch(rank, step)).pow(2).mean().backward()
        except (StopError, ReducerError) as error:
            messages.append(str(error))
            continue
        optimizers[0].step()
        optimizers[1].zero_grad()
        for data_rank in range(ranks):
            (plain(batch(data_rank, step)).pow(2).mean() / ranks).backward()
        optimizers[1].step()
        pairs = zip(ddp.parameters(), plain.parameters(), strict=True)
        difference = max(difference, *(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs))
    return {"difference": difference, "messages": messages}


def training_with_drops(rank: int, world_size: int, fails_at: FailsAt) -> dict[str, Any]:
    results = {}
    for name, options in OPTIONS.items() if world_size == 2 else [("skipped", OPTIONS["skipped"])]:
        for layer in (4, 2):  # Before the first launch of a bucket, and after it.
            ddp = DistributedDataParallel(net(), **CAP, **options)
            if name == "hook":
                ddp.register_comm_hook(None, default_hooks.allreduce_hook)
            results[f"{name}, {layer}"] = train_and_drop(ddp, rank, layer, fails_at, set_to_none=name != "plain")
    return results


@pytest.mark.parametrize(("fails_at", "ranks"), [(on_every_rank, 2), (on_one_rank, 2), (on_one_rank, 4)])
def test_a_batch_whose_backward_fails_can_be_dropped(fails_at: FailsAt, ranks: int) -> None:
    """If it fails on one rank alone, the other ranks get an error and drop it too."""
    for rank, answers in enumerate(run_ranks(training_with_drops, ranks, fails_at)):
        for name, answer in answers.items():
            assert answer["difference"] < 1e-5, (rank, name)
            assert len(answer["messages"]) == 2, (rank, name)
            if fails_at is on_one_rank and rank != 1:
                assert all(text.startswith("rank 1: an error interrupted") for text in answer["messages"]), name


def errors_with_evaluation(rank: int, world_size: int) -> list[list[str]]:
    """Return the errors of a training in which an evaluation, with a buffer broadcast, follows each backward."""
    by_mode = []
    for no_gradients in (torch.no_grad, torch.inference_mode):
        model = nn.Sequential(net(), nn.BatchNorm1d(2), nn.Linear(2, 1))
        ddp, errors = DistributedDataParallel(model, **CAP), []
        fails = make_interruptible(ddp, 2)
        for step in range(4):
            ddp.zero_grad()
            fails[0] = rank == 1 and step == 1
            try:
                ddp(batch(rank, step)).sum().backward()
            except (StopError, ReducerError) as error:
                errors.append(type(error).__name__)
            with no_gradients():
                ddp(batch(rank, step))
        by_mode.append(errors)
    return by_mode


def test_an_evaluation_may_follow_a_backward_that_failed_on_one_rank() -> None:
    assert run_ranks(errors_with_evaluation, 2) == [[["ReducerError"]] * 2, [["StopError"]] * 2]


def errors_of_two_modules(rank: int, world_size: int, variants: list[dict[str, Any]]) -> list[Any]:
    """Let a backward through two modules fail on one rank after both have begun.

    Returns:
        By variant: the names of the errors, and the sums of the gradients of the last step.
    """
    by_variant = []
    for options in variants:
        first = DistributedDataParallel(net(), **options)
        torch.manual_seed(1)
        second = DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), **options)
        fails, errors = make_interruptible(first, 2), []
        for step in range(4):
            first.zero_grad()
            second.zero_grad()
            fails[0] = rank == 1 and step == 1
            try:
                second(first(batch(rank, step))).pow(2).sum().backward()
            except (StopError, ReducerError) as error:
                errors.append(type(error).__name__)
        by_variant.append([errors, [grad(p).sum().item() for p in (*first.parameters(), *second.parameters())]])
    return by_variant


def test_a_backward_through_two_modules_may_fail_on_one_rank() -> None:
    healthy, failed = run_ranks(errors_of_two_modules, 2, [{}, CAP, {"bucket_cap_mb": 1e-5}])
    assert [errors for errors, _ in healthy] == [["ReducerError"]] * 3
    assert [errors for errors, _ in failed] == [["StopError"]] * 3
    assert [sums for _, sums in healthy] == [sums for _, sums in failed]


def errors_after_the_last_gradient(rank: int, world_size: int, failing_ranks: tuple[int, ...]) -> list[str]:
    """Raise in the backward of the model's input on some ranks, after all gradients of the model are ready."""
    ddp, errors = DistributedDataParallel(net(), **CAP), []
    inputs = batch(rank).requires_grad_()
    activations = inputs * 1

    def stop(_: torch.Tensor) -> None:
        if rank in failing_ranks:
            raise StopError

    activations.register_hook(stop)
    for step in range(3):
        ddp.zero_grad()
        try:
            ddp(activations if step == 0 else batch(rank, step)).sum().backward()
        except (StopError, ReducerError) as error:
            errors.append(type(error).__name__)
    return errors


def test_an_error_after_the_last_gradient_is_raised_on_every_rank() -> None:
    assert run_ranks(errors_after_the_last_gradient, 2, (0, 1)) == [["StopError"]] * 2
    assert run_ranks(errors_after_the_last_gradient, 2, (1,)) == [["ReducerError"], ["StopError"]]


def steps_with_a_failed_reduction(rank: int, _world_size: int) -> list[int]:
    """Return the recorded steps of a training whose third reduction fails, as after the death of a peer."""

    def hook(fails, bucket):  # type: ignore[no-untyped-def]
        work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

        def finish(_: object) -> torch.Tensor:
            if fails:
                raise ConnectionError
            buffer: torch.Tensor = bucket.buffer()
            return buffer

        return work.then(finish)

    fails: list[bool] = []
    with sending() as capture:
        ddp = TorchDDP(net())
        attach(ddp, capture.config)
        ddp.register_comm_hook(fails, hook)
        for step in range(3):
            fails[:] = [True] * (step == 2)
            with suppress(Exception):
                ddp(batch(rank, step)).sum().backward()
    return capture.steps("step")


def test_a_failed_reduction_completes_no_step() -> None:
    assert run_ranks(steps_with_a_failed_reduction, 2) == [[0, 1]] * 2


def hook_that_fails(fails, bucket):  # type: ignore[no-untyped-def] # torch checks annotations
    """Return the mean. On the failing rank, raise at the launch or at the completion of the last bucket."""
    if bucket.is_last() and fails == ["launch"]:
        raise StopError
    group: Any = None
    future = default_hooks.allreduce_hook(group, bucket)
    if not bucket.is_last() or fails != ["wait"]:
        return future

    def fail(_: object) -> torch.Tensor:
        raise StopError

    return future.then(fail)


def training_with_failing_hooks(rank: int, world_size: int) -> list[list[str]]:
    """Return by variant the kinds of the errors, then the sums of the gradients of the last step."""
    by_variant = []
    for options in (CAP, {}, CAP | {"static_graph": True}, CAP | {"find_unused_parameters": True}):
        for failing_call in ("launch", "wait"):
            fails: list[str] = []
            ddp, errors = DistributedDataParallel(net(), **options), []
            ddp.register_comm_hook(fails, hook_that_fails)
            for step in range(6):
                fails[:] = [failing_call] * (rank == 1 and step in {0, 3})
                ddp.zero_grad()
                try:
                    ddp(batch(rank, step)).pow(2).mean().backward()
                except (StopError, ReducerError, RuntimeError) as error:
                    errors.append("interrupted" if "an error interrupted" in str(error) else "stopped")
            by_variant.append([*errors, *(f"{grad(p).sum().item():.6f}" for p in ddp.parameters())])
    return by_variant


def test_a_hook_may_fail_on_one_rank_with_the_last_bucket() -> None:
    by_rank = run_ranks(training_with_failing_hooks, 2)
    for healthy, failed in zip(*by_rank, strict=True):
        assert healthy[:2] == ["interrupted"] * 2
        assert failed[:2] == ["stopped"] * 2
        assert healthy[2:] == failed[2:]


def inference_during_backward(kind: Any, rank: int) -> list[torch.Tensor]:
    """Train while another thread runs the model, and another model of its group, in the middle of each backward."""
    ddp, second = kind(net(), **CAP), kind(net())

    def infer() -> None:
        with torch.no_grad():
            ddp(batch(rank, 9))
            second(batch(rank, 9))

    def infer_in_a_thread(_: torch.Tensor) -> None:
        thread = threading.Thread(target=infer)
        thread.start()
        thread.join()

    ddp.module[2].weight.register_hook(infer_in_a_thread)
    return train(ddp, rank)


def verdict_with_inference(rank: int, world_size: int) -> str:
    return verdicts({"inference": inference_during_backward}, rank)["inference"]


def test_another_thread_may_run_a_model_that_is_in_training() -> None:
    assert run_ranks(verdict_with_inference, 2) == ["equal"] * 2
