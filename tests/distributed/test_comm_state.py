"""What the ways keep from step to step: what they owe, their groups, their count of steps."""

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
from tests.distributed.compare import batch, net, train
from tests.distributed.launch import run_ranks
from tests.distributed.test_comm import CAP, WAYS, same_everywhere

STEPS, OVERFLOWS = 8, 4


def overflowing(rank: int, world_size: int) -> dict[str, list[tuple[bool, bool]]]:
    """By way, after each step: whether all gradients are finite, and whether they are every rank's.

    On rank 1 one step's loss, or one gradient of it alone, is infinite; as GradScaler does, the optimizer leaves that
    step out.
    """
    found = {}
    ways = [*WAYS, partial(PowerSGD, rank=2, start_iteration=2)]
    for way in ways:
        for groups in (1, 2):
            for everywhere in (True, False):
                ddp = DistributedDataParallel(net(), comm=way, round_robin_groups=groups, **CAP)
                optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
                told = found[f"{way}, {groups} groups, {everywhere=}"] = []
                for step in range(STEPS):
                    optimizer.zero_grad()
                    overflow = torch.inf if step == OVERFLOWS and rank == 1 else 1.0
                    bias = list(ddp.parameters())[-1]
                    hook = bias.register_hook(lambda gradient, by=overflow: gradient * by)
                    (ddp(batch(rank, step)).pow(2).mean() * (overflow if everywhere else 1.0)).backward()
                    hook.remove()
                    gradients = [p.grad for p in ddp.parameters() if p.grad is not None]
                    finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
                    told.append((finite, same_everywhere([gradient.nan_to_num() for gradient in gradients])))
                    if finite:
                        optimizer.step()
    return found


def test_an_overflow_on_one_rank_is_every_ranks_in_that_step_and_in_no_other() -> None:
    expected = [(step != OVERFLOWS, True) for step in range(STEPS)]
    for found in run_ranks(overflowing, 2):
        assert {way: told for way, told in found.items() if told != expected} == {}


def copied_alone(rank: int, world_size: int, way: str, groups: int) -> bool:
    """Whether copies that rank 0 makes, before the first backward and after it, leave the training as it was."""

    def made() -> Any:
        return DistributedDataParallel(net(), comm=way, round_robin_groups=groups, **CAP)

    ours, twin = made(), made()
    trained = train(twin, rank, 3)
    if rank == 0:
        copy.deepcopy(ours)
        pickle.loads(pickle.dumps(ours))
    same = all(map(torch.equal, train(ours, rank, 3), trained))
    if rank == 0:
        copy.deepcopy(ours)
    return same and same_everywhere(train(ours, rank, 1))


@pytest.mark.parametrize(("way", "groups"), [(way, 1 + (way == "all_reduce")) for way in WAYS] + [("int8", 3)])
def test_a_copy_on_one_rank_alone_waits_for_nobody(way: str, groups: int) -> None:
    assert run_ranks(copied_alone, 2, way, groups, timeout_s=30) == [True, True]


def replaced_unused(rank: int, world_size: int) -> dict[str, bool]:
    """By way, whether a module whose group is replaced before its first backward trains as others do."""
    found = {}
    for way in WAYS:
        first, second = (DistributedDataParallel(net(), comm=way, round_robin_groups=2, **CAP) for _ in range(2))
        first._update_process_group(dist.new_group())
        found[way] = all(map(torch.equal, train(first, rank), train(second, rank)))
    return found


def test_what_was_never_used_is_closed_without_a_word() -> None:
    assert run_ranks(replaced_unused, 2) == [dict.fromkeys(WAYS, True)] * 2


def compressed(rank: int, world_size: int) -> dict[int, tuple[int, list[int]]]:
    """By number of groups: how many buckets there are, and which of them PowerSGD compressed in its third step."""
    found = {}
    for groups in (1, 2, 3):
        way = partial(PowerSGD, rank=1, start_iteration=3)
        ddp = DistributedDataParallel(net(), comm=way, round_robin_groups=groups, bucket_cap_mb=0.001)
        train(ddp, rank, steps=4)
        comm: Any = ddp.reducer.core.comm
        owed = [index for each in getattr(comm, "_comms", [comm]) for index in each._state.error_dict]
        found[groups] = len(ddp.reducer.core.buckets), sorted(owed)
    return found


def test_powersgd_compresses_every_groups_buckets_from_its_first_iteration_on() -> None:
    for found in run_ranks(compressed, 2):
        for buckets, owed in found.values():
            assert buckets >= 3
            assert owed == list(range(buckets))
