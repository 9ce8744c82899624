"""A backward that an error ends, on one rank or on all: the batch can be dropped, and no rank hangs."""

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
from tests.distributed.compare import batch, net, train, verdicts
from tests.distributed.launch import run_ranks
from tests.distributed.sent import sending

CAP = {"bucket_cap_mb": 0.05}
STEPS = 6
Breaks = Callable[[int, int], bool]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flag": {"find_unused_parameters": True},
    "skipped": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "hook": {},
}


class StopError(Exception):
    """What a user catches, to go on with the next batch."""


def on_every_rank(_rank: int, step: int) -> bool:
    return step in {0, 3}


def on_one_rank(rank: int, step: int) -> bool:
    return rank == 1 and step in {0, 3}


def breaking(ddp: Any, layer: int) -> list[bool]:
    """Have a backward raise before that layer's weight gets its gradient, where the list holds True."""
    breaks = [False]

    def stop(_: torch.Tensor) -> None:
        if breaks[0]:
            raise StopError

    ddp.module[layer].weight.register_hook(stop)
    return breaks


def skipping(ddp: Any, rank: int, layer: int, when: Breaks, set_to_none: bool) -> dict[str, Any]:
    """Train, drop the batches whose backward fails; how far each step is from one without DDP, and what was raised."""
    breaks, alone = breaking(ddp, layer), net()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (ddp, alone)]
    ranks = dist.get_world_size()
    told, apart = [], 0.0
    for step in range(STEPS):
        breaks[0] = when(rank, step)
        optimizers[0].zero_grad(set_to_none=set_to_none)
        try:
            ddp(batch(rank, step)).pow(2).mean().backward()
        except (StopError, ReducerError) as error:
            told.append(str(error))
            continue
        optimizers[0].step()
        optimizers[1].zero_grad()
        for other in range(ranks):
            (alone(batch(other, step)).pow(2).mean() / ranks).backward()
        optimizers[1].step()
        pairs = zip(ddp.parameters(), alone.parameters(), strict=True)
        apart = max(apart, *(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs))
    return {"apart": apart, "told": told}


def skipped(rank: int, world_size: int, when: Breaks) -> dict[str, Any]:
    found = {}
    for name, options in WAYS.items() if world_size == 2 else [("skipped", WAYS["skipped"])]:
        for layer in (4, 2):  # No bucket is launched yet, or one is.
            ddp = DistributedDataParallel(net(), **CAP, **options)
            if name == "hook":
                ddp.register_comm_hook(None, default_hooks.allreduce_hook)
            found[f"{name}, {layer}"] = skipping(ddp, rank, layer, when, set_to_none=name != "plain")
    return found


@pytest.mark.parametrize(("when", "ranks"), [(on_every_rank, 2), (on_one_rank, 2), (on_one_rank, 4)])
def test_a_batch_whose_backward_fails_can_be_dropped(when: Breaks, ranks: int) -> None:
    """Also where it fails on one rank alone: the others are told, and drop it too."""
    for rank, answers in enumerate(run_ranks(skipped, ranks, when)):
        for name, answer in answers.items():
            assert answer["apart"] < 1e-5, (rank, name)
            assert len(answer["told"]) == 2, (rank, name)
            if when is on_one_rank and rank != 1:
                assert all(text.startswith("rank 1: an error interrupted") for text in answer["told"]), name


def evaluated(rank: int, world_size: int) -> list[list[str]]:
    """What was raised where an evaluation, whose buffers are broadcast, follows a backward that failed on one rank."""
    found = []
    for evaluates in (torch.no_grad, torch.inference_mode):
        model = nn.Sequential(net(), nn.BatchNorm1d(2), nn.Linear(2, 1))
        ddp, told = DistributedDataParallel(model, **CAP), []
        breaks = breaking(ddp, 2)
        for step in range(4):
            ddp.zero_grad()
            breaks[0] = rank == 1 and step == 1
            try:
                ddp(batch(rank, step)).sum().backward()
            except (StopError, ReducerError) as error:
                told.append(type(error).__name__)
            with evaluates():
                ddp(batch(rank, step))
        found.append(told)
    return found


def test_an_evaluation_may_follow_a_backward_that_failed_on_one_rank() -> None:
    assert run_ranks(evaluated, 2, timeout_s=20) == [[["ReducerError"]] * 2, [["StopError"]] * 2]


def in_a_chain(rank: int, world_size: int, ways: list[dict[str, Any]]) -> list[Any]:
    """Two modules in one backward, which fails on one rank after both have begun; then gradients as they should be."""
    found = []
    for way in ways:
        first = DistributedDataParallel(net(), **way)
        torch.manual_seed(1)
        second = DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), **way)
        breaks, told = breaking(first, 2), []
        for step in range(4):
            first.zero_grad()
            second.zero_grad()
            breaks[0] = rank == 1 and step == 1
            try:
                second(first(batch(rank, step))).pow(2).sum().backward()
            except (StopError, ReducerError) as error:
                told.append(type(error).__name__)
        found.append([told, [p.grad.sum().item() for p in (*first.parameters(), *second.parameters())]])
    return found


def test_a_backward_through_two_modules_may_fail_on_one_rank() -> None:
    one, other = run_ranks(in_a_chain, 2, [{}, CAP, {"bucket_cap_mb": 1e-5}], timeout_s=30)
    assert [told for told, _ in one] == [["ReducerError"]] * 3
    assert [told for told, _ in other] == [["StopError"]] * 3
    assert [sums for _, sums in one] == [sums for _, sums in other]


def too_late(rank: int, world_size: int, where: tuple[int, ...]) -> list[str]:
    """An error above the model on some ranks, once every gradient of it has come."""
    ddp, told = DistributedDataParallel(net(), **CAP), []
    inputs = batch(rank).requires_grad_()
    above = inputs * 1

    def stop(_: torch.Tensor) -> None:
        if rank in where:
            raise StopError

    above.register_hook(stop)
    for step in range(3):
        ddp.zero_grad()
        try:
            ddp(above if step == 0 else batch(rank, step)).sum().backward()
        except (StopError, ReducerError) as error:
            told.append(type(error).__name__)
    return told


def test_an_error_after_the_last_gradient_is_told_to_every_rank_that_has_none() -> None:
    assert run_ranks(too_late, 2, (0, 1)) == [["StopError"]] * 2
    assert run_ranks(too_late, 2, (1,)) == [["ReducerError"], ["StopError"]]


def reduction_that_fails(rank: int, _world_size: int) -> list[int]:
    """The gradients of the last of three steps are never reduced, as where a peer has died."""

    def hook(fails, bucket):  # type: ignore[no-untyped-def]
        work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

        def done(_: object) -> torch.Tensor:
            if fails:
                raise ConnectionError
            return bucket.buffer()

        return work.then(done)

    fails: list[bool] = []
    with sending() as sent:
        ddp = TorchDDP(net())
        attach(ddp, sent.config)
        ddp.register_comm_hook(fails, hook)
        for step in range(3):
            fails[:] = [True] * (step == 2)
            with suppress(Exception):
                ddp(batch(rank, step)).sum().backward()
    return sent.steps("step")


def test_a_reduction_that_failed_ends_no_step() -> None:
    assert run_ranks(reduction_that_fails, 2) == [[0, 1]] * 2


def hook_that_fails(fails, bucket):  # type: ignore[no-untyped-def] # torch checks annotations
    """The mean; on a rank that fails it raises where the last bucket is launched, or when that one is done."""
    if bucket.is_last() and fails == ["launch"]:
        raise StopError
    future = default_hooks.allreduce_hook(None, bucket)
    if not bucket.is_last() or fails != ["wait"]:
        return future

    def done(_: object) -> torch.Tensor:
        raise StopError

    return future.then(done)


def hooked(rank: int, world_size: int) -> list[list[str]]:
    found = []
    for options in (CAP, {}, CAP | {"static_graph": True}, CAP | {"find_unused_parameters": True}):
        for where in ("launch", "wait"):
            fails: list[str] = []
            ddp, told = DistributedDataParallel(net(), **options), []
            ddp.register_comm_hook(fails, hook_that_fails)
            for step in range(6):
                fails[:] = [where] * (rank == 1 and step in {0, 3})
                ddp.zero_grad()
                try:
                    ddp(batch(rank, step)).pow(2).mean().backward()
                except (StopError, ReducerError, RuntimeError) as error:
                    told.append("interrupted" if "an error interrupted" in str(error) else "stopped")
            found.append([*told, *(f"{p.grad.sum().item():.6f}" for p in ddp.parameters())])
    return found


def test_a_hook_may_fail_on_one_rank_with_the_last_bucket() -> None:
    one, other = run_ranks(hooked, 2, timeout_s=30)
    for mine, theirs in zip(one, other, strict=True):
        assert mine[:2] == ["interrupted"] * 2
        assert theirs[:2] == ["stopped"] * 2
        assert mine[2:] == theirs[2:]


def asked_meanwhile(kind: Any, rank: int) -> list[torch.Tensor]:
    """Another thread asks the model, and others of its group, in the midst of each backward."""
    ddp, beside = kind(net(), **CAP), kind(net())

    def ask() -> None:
        with torch.no_grad():
            ddp(batch(rank, 9))
            beside(batch(rank, 9))

    def in_a_thread(_: torch.Tensor) -> None:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()

    ddp.module[2].weight.register_hook(in_a_thread)
    return train(ddp, rank)


def asked(rank: int, world_size: int) -> str:
    return verdicts({"asked": asked_meanwhile}, rank)["asked"]


def test_another_thread_may_ask_a_model_that_is_trained() -> None:
    assert run_ranks(asked, 2, timeout_s=30) == ["equal"] * 2
