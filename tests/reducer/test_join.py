"""Uneven inputs under `join`: ranks without data repeat the collectives of the other ranks, call for call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddpobs import DistributedDataParallel
from ddpobs.errors import ReducerError
from tests.support.distributed.compare import CAP, batch, net
from tests.support.distributed.interrupts import StopError, make_interruptible
from tests.support.distributed.joins import CASES, plain, train_unevenly
from tests.support.distributed.launch import run_ranks


def skipping_unused(kind: Any, rank: int) -> Any:
    return train_unevenly(kind(net(), find_unused_parameters=True, skip_all_reduce_unused_params=True, **CAP), rank)


@pytest.mark.parametrize("case", CASES)
def test_uneven_inputs_train_as_with_torch(verdicts_by_rank: list[dict[str, str]], case: str) -> None:
    assert {verdict[case] for verdict in verdicts_by_rank} == {"equal"}


def train_two_epochs(ddp: Any, rank: int) -> list[torch.Tensor]:
    """Train with data on the last rank alone in the first epoch, and on all ranks in the second."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    last = dist.get_world_size() - 1
    for batches in (3 if rank == last else 0, 2 + rank):
        with ddp.join():
            for step in range(batches):
                optimizer.zero_grad()
                ddp(batch(rank, step)).pow(2).mean().backward()
                optimizer.step()
    return [p.detach().clone() for p in ddp.parameters()]


def static_graph_agrees(rank: int, world_size: int) -> bool:
    """Compare with torch's DDP without `static_graph`: with it, torch's DDP hangs."""
    ours = train_two_epochs(DistributedDataParallel(net(), static_graph=True, **CAP), rank)
    return all(map(torch.allclose, ours, train_two_epochs(TorchDDP(net(), **CAP), rank)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_static_graph_begins_without_the_ranks_that_have_no_data_yet(ranks: int) -> None:
    assert run_ranks(static_graph_agrees, ranks) == [True] * ranks


def train_embedding(rank: int, sparse: bool) -> list[torch.Tensor]:
    torch.manual_seed(2)
    ddp = DistributedDataParallel(nn.Sequential(nn.Embedding(10, 4, sparse=sparse), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for step in range(1 + rank):
            optimizer.zero_grad()
            ddp(torch.tensor([step, rank, 5])).pow(2).sum().backward()
            optimizer.step()
    return [p.detach().clone() for p in ddp.parameters()]


def sparse_agrees(rank: int, world_size: int) -> bool:
    return all(map(torch.allclose, train_embedding(rank, True), train_embedding(rank, False)))


def test_a_rank_without_data_takes_part_with_sparse_gradients() -> None:
    assert run_ranks(sparse_agrees, 2) == [True, True]


def skipping_agrees(rank: int, world_size: int) -> bool:
    skipping = skipping_unused(DistributedDataParallel, rank)
    return all(torch.allclose(a, b) for a, b in zip(skipping, plain(DistributedDataParallel, rank), strict=True))


def test_a_rank_without_data_takes_part_if_unused_buckets_are_skipped() -> None:
    assert run_ranks(skipping_agrees, 2) == [True, True]


def training_with_a_drop(rank: int, world_size: int, fails_at: int, options: dict[str, Any]) -> list[Any]:
    """Let rank 1, which has three batches, drop one after rank 0 has run out of data.

    Returns:
        The names of the errors, and the sums of the last gradients.
    """
    ddp, errors = DistributedDataParallel(net(), **CAP, **options), []
    fails = make_interruptible(ddp, 2)
    with ddp.join():
        for step in range((1, 3, 5)[rank]):
            ddp.zero_grad()
            fails[0] = rank == 1 and step == fails_at
            try:
                ddp(batch(rank, step)).pow(2).mean().backward()
            except (StopError, ReducerError) as error:
                errors.append(type(error).__name__)
    return [errors, [p.grad.sum().item() for p in ddp.parameters() if p.grad is not None]]


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_rank_may_drop_a_batch_or_its_last_batch_after_another_rank_ran_out_of_data(
    fails_at: int, options: dict[str, Any]
) -> None:
    first, second, third = run_ranks(training_with_a_drop, 3, fails_at, options)
    assert (first[0], second[0], third[0]) == ([], ["StopError"], ["ReducerError"])
    plain_model = net()
    (plain_model(batch(2, 4)).pow(2).mean() / 3).backward()
    assert third[1] == pytest.approx(
        [p.grad.sum().item() for p in plain_model.parameters() if p.grad is not None], abs=1e-6
    )
