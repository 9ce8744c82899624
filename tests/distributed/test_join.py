"""Uneven inputs under `join`: ranks that ran out of data shadow the others, call for call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddpobs import DistributedDataParallel
from ddpobs.errors import ReducerError
from tests.distributed.compare import batch, net, outcome
from tests.distributed.launch import run_ranks
from tests.distributed.test_interrupted_backwards import StopError, breaking

CAP = {"bucket_cap_mb": 0.05}


def uneven(ddp: Any, rank: int, **options: Any) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with ddp.join(**options):
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            ddp(batch(rank, step)).pow(2).mean().backward()
            optimizer.step()
    return [p.detach().clone() for p in ddp.parameters()]


def plain(kind: Any, rank: int) -> Any:
    return uneven(kind(net(), **CAP), rank)


def finding_unused(kind: Any, rank: int) -> Any:
    return uneven(kind(net(), find_unused_parameters=True, **CAP), rank)


def skipping_unused(kind: Any, rank: int) -> Any:
    return uneven(kind(net(), find_unused_parameters=True, skip_all_reduce_unused_params=True, **CAP), rank)


def divided_by_the_active(kind: Any, rank: int) -> Any:
    return uneven(kind(net(), **CAP), rank, divide_by_initial_world_size=False)


def with_buffers(kind: Any, rank: int) -> Any:
    torch.manual_seed(1)
    ddp = kind(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), **CAP)
    return [*uneven(ddp, rank), *(buffer.clone() for buffer in ddp.buffers())]


def with_fp16(kind: Any, rank: int) -> Any:
    ddp = kind(net(), **CAP)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return uneven(ddp, rank)


def terminated_early(kind: Any, rank: int) -> Any:
    ddp = kind(net(), **CAP)
    try:
        uneven(ddp, rank, throw_on_early_termination=True)
    except RuntimeError as error:
        return [str(error)[:30], *outcome(ddp)]
    return "no error"


def accumulating(kind: Any, rank: int) -> Any:
    ddp = kind(net(), **CAP)
    with ddp.join():
        for step in range(2 + rank):
            ddp.zero_grad()
            with ddp.no_sync():
                ddp(batch(rank, step)).sum().backward()
            ddp(batch(rank, step + 9)).sum().backward()
    return [p.detach().clone() for p in ddp.parameters()]


def disabled(kind: Any, rank: int) -> Any:
    ddp = kind(net(), **CAP)
    with ddp.join(enable=False):
        ddp(batch(rank)).sum().backward()
    return outcome(ddp)


CASES = {
    function.__name__: function
    for function in (
        plain,
        finding_unused,
        divided_by_the_active,
        with_buffers,
        with_fp16,
        terminated_early,
        accumulating,
        disabled,
    )
}


@pytest.mark.parametrize("case", CASES)
def test_uneven_inputs_train_as_with_torch(found: list[dict[str, str]], case: str) -> None:
    assert {verdict[case] for verdict in found} == {"equal"}


def late(ddp: Any, rank: int) -> list[torch.Tensor]:
    """The last rank alone has data in the first epoch, the others only in the second one."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    last = dist.get_world_size() - 1
    for batches in (3 if rank == last else 0, 2 + rank):
        with ddp.join():
            for step in range(batches):
                optimizer.zero_grad()
                ddp(batch(rank, step)).pow(2).mean().backward()
                optimizer.step()
    return [p.detach().clone() for p in ddp.parameters()]


def static(rank: int, world_size: int) -> bool:
    """Against torch's without `static_graph`: with it, torch's hangs."""
    ours = late(DistributedDataParallel(net(), static_graph=True, **CAP), rank)
    return all(map(torch.allclose, ours, late(TorchDDP(net(), **CAP), rank)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_static_graph_begins_without_the_ranks_that_have_no_data_yet(ranks: int) -> None:
    assert run_ranks(static, ranks, timeout_s=40) == [True] * ranks


def embedding(rank: int, sparse: bool) -> list[torch.Tensor]:
    torch.manual_seed(2)
    ddp = DistributedDataParallel(nn.Sequential(nn.Embedding(10, 4, sparse=sparse), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for step in range(1 + rank):
            optimizer.zero_grad()
            ddp(torch.tensor([step, rank, 5])).pow(2).sum().backward()
            optimizer.step()
    return [p.detach().clone() for p in ddp.parameters()]


def sparse(rank: int, world_size: int) -> bool:
    return all(map(torch.allclose, embedding(rank, True), embedding(rank, False)))


def test_sparse_gradients_are_shadowed_where_torch_fails() -> None:
    assert run_ranks(sparse, 2) == [True, True]


def skipped(rank: int, world_size: int) -> bool:
    skipping = skipping_unused(DistributedDataParallel, rank)
    return all(torch.allclose(a, b) for a, b in zip(skipping, plain(DistributedDataParallel, rank), strict=True))


def test_buckets_left_out_where_unused_are_shadowed_too() -> None:
    assert run_ranks(skipped, 2) == [True, True]


def dropping(rank: int, world_size: int, fails_at: int, options: dict[str, Any]) -> list[Any]:
    """What was raised where rank 1, which has three batches, drops one; rank 0 has run out of data before."""
    ddp, told = DistributedDataParallel(net(), **CAP, **options), []
    breaks = breaking(ddp, 2)
    with ddp.join():
        for step in range((1, 3, 5)[rank]):
            ddp.zero_grad()
            breaks[0] = rank == 1 and step == fails_at
            try:
                ddp(batch(rank, step)).pow(2).mean().backward()
            except (StopError, ReducerError) as error:
                told.append(type(error).__name__)
    return [told, [p.grad.sum().item() for p in ddp.parameters() if p.grad is not None]]


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_batch_can_be_dropped_beside_a_rank_that_has_none_and_as_the_last_one(
    fails_at: int, options: dict[str, Any]
) -> None:
    first, second, third = run_ranks(dropping, 3, fails_at, options, timeout_s=60)
    assert (first[0], second[0], third[0]) == ([], ["StopError"], ["ReducerError"])
    alone = net()
    (alone(batch(2, 4)).pow(2).mean() / 3).backward()
    assert third[1] == pytest.approx([p.grad.sum().item() for p in alone.parameters() if p.grad is not None], abs=1e-6)
