"""How long the process groups and threads live that a way needs beside its module's own, and who shares them."""

from __future__ import annotations

import gc
import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpobs import DistributedDataParallel
from ddpobs.buckets.bucket import Bucket
from ddpobs.comm import Pending, PowerSGD
from ddpobs.comm.multi_stage import Stages
from tests.distributed.compare import batch, net, outcome, train
from tests.distributed.launch import run_ranks
from tests.distributed.test_comm import CAP

WAYS = [("int8", 1), ("powersgd:2", 1), ("parameter_server", 1), ("all_reduce", 3), ("int8", 2)]
"""Those that need groups of their own, and over how many groups in turn."""


def made(way: Any, groups: int = 1, group: Any = None) -> Any:
    return DistributedDataParallel(net(), process_group=group, comm=way, round_robin_groups=groups, **CAP)


def groups_known() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def held() -> tuple[int, int]:
    """Process groups that torch knows, and threads that run stages."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "ddpobs-comm":
            thread.join(0.3)  # One that was told to end needs a moment.
    return groups_known(), sum(thread.name == "ddpobs-comm" for thread in threading.enumerate())


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))


def restart(rank: int, world_size: int, store: Path) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    dist.barrier()  # As in `launch`.


def modules_that_go(rank: int, world_size: int) -> dict[str, list[tuple[int, int]]]:
    """By way, what is held after each of some modules. Rank 1 collects none of them."""
    found: dict[str, list[tuple[int, int]]] = {}
    kept = []
    for way, groups in WAYS:
        for _ in range(3):
            ddp = made(way, groups)
            train(ddp, rank, 2)
            if rank == 1:
                kept.append(ddp)
            del ddp
            found.setdefault(f"{way}, {groups} groups", []).append(held())
    return found


def test_modules_that_go_leave_no_groups_and_no_threads() -> None:
    alone, kept = run_ranks(modules_that_go, 2)
    assert alone == kept
    assert {way: counts for way, counts in alone.items() if len(set(counts)) > 1} == {}


def in_turn(rank: int, world_size: int) -> list[int]:
    """Groups beside the world after modules with ever another number of groups in turn."""
    counts = []
    for groups in (3, 2, 4, 3):
        train(made("all_reduce", groups), rank, 1)
        counts.append(groups_known() - 1)
    return counts


def test_modules_share_the_groups_that_buckets_go_to_in_turn() -> None:
    assert run_ranks(in_turn, 2) == [[2, 2, 3, 3]] * 2


def after_a_restart(rank: int, world_size: int, folder: Path) -> dict[str, tuple[bool, bool]]:
    """By way: whether a module trains on in a world made anew as in another group, and nothing of the old is held."""
    found = {}
    for number, (way, groups) in enumerate(WAYS):
        kept, moved = made(way, groups), made(way, groups)
        train(kept, rank, 2)
        kept._update_process_group(dist.new_group())
        expected = train(kept, rank, 2)
        used = held()
        del kept
        train(moved, rank, 2)
        restart(rank, world_size, folder / str(number))
        moved._update_process_group(dist.group.WORLD)
        same = equal(train(moved, rank, 2), expected)
        # Before, there were two groups, and what each had beside it.
        found[f"{way}, {groups} groups"] = same, held() == (used[0] // 2, used[1] // 2)
        del moved
        restart(rank, world_size, folder / f"{number}, ended")
    return found


def test_a_module_outlives_the_world_that_it_was_made_in(tmp_path: Path) -> None:
    expected = {f"{way}, {groups} groups": (True, True) for way, groups in WAYS}
    assert run_ranks(after_a_restart, 2, tmp_path) == [expected] * 2


def joined_later(rank: int, world_size: int, folder: Path) -> bool:
    """Rank 0 trains in a world of its own first, which has the name that both ranks' world gets."""
    expected = train(made("int8"), rank)
    dist.destroy_process_group()
    if rank == 0:
        restart(0, 1, folder / "alone")
        train(made("int8"), rank)
        train(made("all_reduce", 3), rank)
    restart(rank, world_size, folder / "both")
    return equal(train(made("int8"), rank), expected)


def test_a_rank_that_joins_finds_the_groups_of_those_that_were_there(tmp_path: Path) -> None:
    assert run_ranks(joined_later, 2, tmp_path, timeout_s=40) == [True, True]


def groups_that_go(rank: int, world_size: int) -> dict[str, list[Any]]:
    """By way, what is held in each of some groups that are destroyed one after the other. Rank 1 keeps the modules."""
    found: dict[str, list[Any]] = {}
    kept = []
    for way, groups in WAYS:
        for _ in range(3):
            group = dist.new_group()
            ddp = made(way, groups, group)
            train(ddp, rank, 2)
            found.setdefault(f"{way}, {groups} groups", []).append(groups_known() if rank == 1 else held())
            dist.destroy_process_group(group)
            if rank == 1:
                kept.append(ddp)
            del ddp, group
    return found


def test_what_was_made_beside_a_destroyed_group_goes_with_it() -> None:
    alone, kept = run_ranks(groups_that_go, 2)
    assert {way: counts for way, counts in alone.items() if len(set(counts)) > 1} == {}
    assert kept == {way: [groups for groups, _ in counts] for way, counts in alone.items()}


def one_moved(rank: int, world_size: int) -> dict[str, bool]:
    """By way, whether a module trains on after another one over the same group went to another group."""
    found = {}
    for way, groups in WAYS:
        first, second, alone = (made(way, groups) for _ in range(3))
        for ddp in (first, second, alone):
            train(ddp, rank, 2)
        expected = train(alone, rank, 2)
        first._update_process_group(dist.new_group())
        found[f"{way}, {groups} groups"] = equal(train(second, rank, 2), expected)
    return found


def test_a_module_that_goes_to_another_group_leaves_the_others_theirs() -> None:
    assert run_ranks(one_moved, 2) == [{f"{way}, {groups} groups": True for way, groups in WAYS}] * 2


def together(rank: int, world_size: int) -> list[bool]:
    """Whether each module comes to what it does alone, where all take turns and at times share a backward."""
    kinds = [
        *WAYS,
        (partial(PowerSGD, rank=2, start_iteration=2), 1),
        (partial(PowerSGD, rank=1, start_iteration=2), 2),
    ]
    alone = [train(made(way, groups), rank, 6) for way, groups in kinds]
    modules = [made(way, groups) for way, groups in kinds]
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
    assert run_ranks(together, 2, timeout_s=40) == [[True] * (len(WAYS) + 2)] * 2


class Fails:
    """A way whose stages fail on every rank."""

    name, divides, carries_nan = "fails", False, False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._stages = Stages(group)

    def launch(self, bucket: Bucket, last: bool) -> Pending:
        def stages(_: dist.ProcessGroup) -> None:
            raise ArithmeticError

        return self._stages.run(stages, bucket.buffer.device)


def after_a_fault(rank: int, world_size: int) -> tuple[bool, bool]:
    """Whether a module's stages failed, and another one over the same group trained on as if nothing had been."""
    expected = train(made("int8"), rank, 4)
    ddp, faulty = made("int8"), made(Fails)
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


def test_stages_that_fail_leave_the_other_modules_theirs() -> None:
    assert run_ranks(after_a_fault, 2, timeout_s=40) == [(True, True)] * 2
