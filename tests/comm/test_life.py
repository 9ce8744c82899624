"""The lifetime of side groups and stage threads, and the modules that share them."""

from __future__ import annotations

import gc
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.parameter_server import ParameterServer
from ddpobs import DistributedDataParallel
from ddpobs.buckets.bucket import Bucket
from ddpobs.comm import Pending, PowerSGD
from ddpobs.comm.multi_stage import Stages
from tests.support.distributed.compare import CAP, batch, net, outcome, train
from tests.support.distributed.launch import run_ranks

pytestmark = pytest.mark.wide

CASES = [("int8", 1), ("powersgd:2", 1), (ParameterServer, 1), ("all_reduce", 3), ("int8", 2)]
"""Strategies that need side groups, and the number of round-robin groups."""


def build(strategy: Any, groups: int = 1, group: Any = None) -> Any:
    return DistributedDataParallel(net(), process_group=group, comm=strategy, round_robin_groups=groups, **CAP)


def count_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def count_resources() -> tuple[int, int]:
    """Number of process groups that are registered with torch, and of threads that run stages."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "ddpobs-comm":
            thread.join(0.3)  # A thread needs a moment to end.
    return count_groups(), sum(thread.name == "ddpobs-comm" for thread in threading.enumerate())


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))


def restart(rank: int, world_size: int, store: Path) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    dist.barrier()  # As in `launch`.


def collected_modules(rank: int, world_size: int) -> dict[str, list[tuple[int, int]]]:
    """By case, the resources after each of three modules. Rank 1 keeps all modules alive."""
    results: dict[str, list[tuple[int, int]]] = {}
    kept_models = []
    for strategy, groups in CASES:
        for _ in range(3):
            ddp = build(strategy, groups)
            train(ddp, rank, 2)
            if rank == 1:
                kept_models.append(ddp)
            del ddp
            results.setdefault(f"{strategy}, {groups} groups", []).append(count_resources())
    return results


def test_collected_modules_leave_no_groups_and_no_threads() -> None:
    alone, kept_models = run_ranks(collected_modules, 2)
    assert alone == kept_models
    assert {strategy: counts for strategy, counts in alone.items() if len(set(counts)) > 1} == {}


def in_turn(rank: int, world_size: int) -> list[int]:
    """Number of side groups after modules with different numbers of round-robin groups."""
    counts = []
    for groups in (3, 2, 4, 3):
        train(build("all_reduce", groups), rank, 1)
        counts.append(count_groups() - 1)
    return counts


def test_modules_share_the_round_robin_groups() -> None:
    assert run_ranks(in_turn, 2) == [[2, 2, 3, 3]] * 2


def after_a_restart(rank: int, world_size: int, folder: Path) -> dict[str, tuple[bool, bool]]:
    """By case: whether a module trains on in a new world as in another group, and whether the old groups are gone."""
    results = {}
    for number, (strategy, groups) in enumerate(CASES):
        kept_models, moved = build(strategy, groups), build(strategy, groups)
        train(kept_models, rank, 2)
        kept_models._update_process_group(dist.new_group())
        expected = train(kept_models, rank, 2)
        used = count_resources()
        del kept_models
        train(moved, rank, 2)
        restart(rank, world_size, folder / str(number))
        moved._update_process_group(dist.group.WORLD)
        same = equal(train(moved, rank, 2), expected)
        # Before the restart there were two groups, each with its side groups.
        results[f"{strategy}, {groups} groups"] = same, count_resources() == (used[0] // 2, used[1] // 2)
        del moved
        restart(rank, world_size, folder / f"{number}, ended")
    return results


def test_a_module_outlives_the_world_of_its_construction(tmp_path: Path) -> None:
    expected = {f"{strategy}, {groups} groups": (True, True) for strategy, groups in CASES}
    assert run_ranks(after_a_restart, 2, tmp_path) == [expected] * 2


def joined_later(rank: int, world_size: int, folder: Path) -> bool:
    """Rank 0 first trains in a world of one rank, which has the same name as the world of both ranks."""
    expected = train(build("int8"), rank)
    dist.destroy_process_group()
    if rank == 0:
        restart(0, 1, folder / "alone")
        train(build("int8"), rank)
        train(build("all_reduce", 3), rank)
    restart(rank, world_size, folder / "both")
    return equal(train(build("int8"), rank), expected)


def test_a_rank_that_joins_later_shares_the_other_ranks_side_groups(tmp_path: Path) -> None:
    assert run_ranks(joined_later, 2, tmp_path) == [True, True]


def destroyed_groups(rank: int, world_size: int) -> dict[str, list[Any]]:
    """By case, the resources in each of three groups that are destroyed in turn. Rank 1 keeps the modules alive."""
    results: dict[str, list[Any]] = {}
    kept_models = []
    for strategy, groups in CASES:
        for _ in range(3):
            group = dist.new_group()
            ddp = build(strategy, groups, group)
            train(ddp, rank, 2)
            results.setdefault(f"{strategy}, {groups} groups", []).append(
                count_groups() if rank == 1 else count_resources()
            )
            dist.destroy_process_group(group)
            if rank == 1:
                kept_models.append(ddp)
            del ddp, group
    return results


def test_side_groups_are_destroyed_with_their_group() -> None:
    alone, kept_models = run_ranks(destroyed_groups, 2)
    assert {strategy: counts for strategy, counts in alone.items() if len(set(counts)) > 1} == {}
    assert kept_models == {strategy: [groups for groups, _ in counts] for strategy, counts in alone.items()}


def one_moved(rank: int, world_size: int) -> dict[str, bool]:
    """By case, whether a module trains on after another module of the same group moved to another group."""
    results = {}
    for strategy, groups in CASES:
        first, second, alone = (build(strategy, groups) for _ in range(3))
        for ddp in (first, second, alone):
            train(ddp, rank, 2)
        expected = train(alone, rank, 2)
        first._update_process_group(dist.new_group())
        results[f"{strategy}, {groups} groups"] = equal(train(second, rank, 2), expected)
    return results


def test_a_module_that_moves_to_another_group_leaves_the_side_groups() -> None:
    assert run_ranks(one_moved, 2) == [{f"{strategy}, {groups} groups": True for strategy, groups in CASES}] * 2


def together(rank: int, world_size: int) -> list[bool]:
    """Whether each module trains as alone, while all take turns and sometimes share a backward."""
    kinds = [
        *CASES,
        (partial(PowerSGD, rank=2, start_iteration=2), 1),
        (partial(PowerSGD, rank=1, start_iteration=2), 2),
    ]
    alone = [train(build(strategy, groups), rank, 6) for strategy, groups in kinds]
    modules = [build(strategy, groups) for strategy, groups in kinds]
    optimizers = [torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9) for ddp in modules]
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [ddp(batch(rank, step)).pow(2).mean() for ddp in modules]
        if step % 2:
            torch.stack(losses).sum().backward()
        else:
            for loss in losses[:: 1 if step % 4 else -1]:
                loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return [equal(outcome(ddp), expected) for ddp, expected in zip(modules, alone, strict=True)]


def test_modules_that_share_one_backward_or_take_turns_train_as_alone() -> None:
    assert run_ranks(together, 2) == [[True] * (len(CASES) + 2)] * 2


class Fails:
    """A strategy that fails in its stages on every rank."""

    name, divides, carries_nan = "fails", False, False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._stages = Stages(group)

    def launch(self, bucket: Bucket, last: bool) -> Pending:
        def stages(_: dist.ProcessGroup) -> None:
            raise ArithmeticError

        return self._stages.run(stages, bucket.buffer.device)


def after_a_fault(rank: int, world_size: int) -> tuple[bool, bool]:
    """Whether a module's stages failed, and whether another module of the same group trained on unharmed."""
    expected = train(build("int8"), rank, 4)
    ddp, faulty = build("int8"), build(Fails)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    failed = False
    for step in range(4):
        optimizer.zero_grad()
        try:
            faulty(batch(rank, step)).pow(2).mean().backward()
        except ArithmeticError:
            failed = True
        ddp(batch(rank, step)).pow(2).mean().backward()
        optimizer.step()
    return failed, equal(outcome(ddp), expected)


def test_failed_stages_do_not_disturb_other_modules() -> None:
    assert run_ranks(after_a_fault, 2) == [(True, True)] * 2
