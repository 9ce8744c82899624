"""The state of strategies between steps: residuals, groups and counts of steps."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpobs import DistributedDataParallel
from ddpobs.comm import PowerSGD
from tests.support.distributed.compare import CAP, batch, net, train
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.strategies import STRATEGIES, same_everywhere

STEPS, OVERFLOWS = 8, 4


def overflowing(rank: int, world_size: int) -> dict[str, list[tuple[bool, bool]]]:
    """By strategy, after each step: whether all gradients are finite, and whether they are the same on every rank.

    On rank 1 the loss of one step, or one gradient alone, is infinite. The optimizer skips that step, as GradScaler
    does.
    """
    results: dict[str, list[tuple[bool, bool]]] = {}
    strategies: list[Any] = [*STRATEGIES, partial(PowerSGD, rank=2, start_iteration=2)]
    for strategy in strategies:
        for groups in (1, 2):
            for everywhere in (True, False):
                ddp = DistributedDataParallel(net(), comm=strategy, round_robin_groups=groups, **CAP)
                optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
                verdicts = results[f"{strategy}, {groups} groups, {everywhere=}"] = []
                for step in range(STEPS):
                    optimizer.zero_grad()
                    overflow = torch.inf if step == OVERFLOWS and rank == 1 else 1.0
                    bias = list(ddp.parameters())[-1]
                    hook = bias.register_hook(lambda gradient, factor=overflow: gradient * factor)
                    (ddp(batch(rank, step)).pow(2).mean() * (overflow if everywhere else 1.0)).backward()
                    hook.remove()
                    gradients = [p.grad for p in ddp.parameters() if p.grad is not None]
                    finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
                    verdicts.append((finite, same_everywhere([gradient.nan_to_num() for gradient in gradients])))
                    if finite:
                        optimizer.step()
    return results


def test_an_overflow_on_one_rank_reaches_every_rank_in_that_step_alone() -> None:
    expected = [(step != OVERFLOWS, True) for step in range(STEPS)]
    for results in run_ranks(overflowing, 2):
        assert {strategy: verdicts for strategy, verdicts in results.items() if verdicts != expected} == {}


def copied_alone(rank: int, world_size: int, strategy: str, groups: int) -> bool:
    """Whether copies on rank 0 alone, before and after the first backward, leave the training unchanged."""

    def build() -> Any:
        return DistributedDataParallel(net(), comm=strategy, round_robin_groups=groups, **CAP)

    ours, twin = build(), build()
    trained = train(twin, rank, 3)
    if rank == 0:
        copy.deepcopy(ours)
        pickle.loads(pickle.dumps(ours))
    same = all(map(torch.equal, train(ours, rank, 3), trained))
    if rank == 0:
        copy.deepcopy(ours)
    return same and same_everywhere(train(ours, rank, 1))


@pytest.mark.parametrize(
    ("strategy", "groups"), [(strategy, 1 + (strategy == "all_reduce")) for strategy in STRATEGIES] + [("int8", 3)]
)
def test_a_copy_on_one_rank_alone_does_not_wait_for_the_others(strategy: str, groups: int) -> None:
    assert run_ranks(copied_alone, 2, strategy, groups) == [True, True]


def replaced_unused(rank: int, world_size: int) -> dict[str, bool]:
    """By strategy, whether a module trains as others do if its group is replaced before the first backward."""
    results = {}
    for strategy in STRATEGIES:
        first, second = (DistributedDataParallel(net(), comm=strategy, round_robin_groups=2, **CAP) for _ in range(2))
        first._update_process_group(dist.new_group())  # type: ignore[no-untyped-call]
        results[strategy] = all(map(torch.equal, train(first, rank), train(second, rank)))
    return results


def test_a_strategy_that_was_never_used_is_replaced_silently() -> None:
    assert run_ranks(replaced_unused, 2) == [dict.fromkeys(STRATEGIES, True)] * 2


def compressed(rank: int, world_size: int) -> dict[int, tuple[int, list[int]]]:
    """By number of groups: the number of buckets, and the buckets that PowerSGD compressed in its third step."""
    results = {}
    for groups in (1, 2, 3):
        strategy = partial(PowerSGD, rank=1, start_iteration=3)
        ddp = DistributedDataParallel(net(), comm=strategy, round_robin_groups=groups, bucket_cap_mb=0.001)
        train(ddp, rank, steps=4)
        comm: Any = ddp.reducer.core.comm
        compressed_buckets = [
            index for comm_of_group in getattr(comm, "_comms", [comm]) for index in comm_of_group._state.error_dict
        ]
        results[groups] = len(ddp.reducer.core.buckets), sorted(compressed_buckets)
    return results


def test_powersgd_compresses_every_groups_buckets_from_its_first_iteration_on() -> None:
    for results in run_ranks(compressed, 2):
        for buckets, compressed_buckets in results.values():
            assert buckets >= 3
            assert compressed_buckets == list(range(buckets))
