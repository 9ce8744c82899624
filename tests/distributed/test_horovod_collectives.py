"""Horovod's collectives as a script for `horovod.torch` calls them."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import ddpobs.horovod as hvd
from ddpobs.errors import HorovodError
from tests.distributed.launch import run_ranks
from tests.distributed.test_horovod import raised


def collectives(rank: int, ranks: int) -> dict[str, Any]:
    hvd.init()
    values = torch.arange(4.0) + rank
    results: dict[str, Any] = {
        "place": (hvd.size(), hvd.rank(), hvd.local_size(), hvd.local_rank(), hvd.cross_size(), hvd.cross_rank()),
        "average": hvd.allreduce(values),
        "sum": hvd.allreduce(values, op=hvd.Sum),
        "older": hvd.allreduce(values, average=False, name="x"),
        "min": hvd.allreduce(values, op=hvd.Min),
        "max": hvd.allreduce(values, op=hvd.Max),
        "product": hvd.allreduce(values, op=hvd.Product),
        "scaled": hvd.allreduce(values, op=hvd.Sum, prescale_factor=2.0, postscale_factor=10.0),
        "half": hvd.allreduce(values, compression=hvd.Compression.fp16),
        "whole": hvd.allreduce(torch.tensor([3 + rank])),
        "grouped": hvd.grouped_allreduce([values, values + 1]),
        "gathered": hvd.allgather(torch.full((rank + 1, 2), float(rank))),
        "root's": hvd.broadcast(values, root_rank=1),
        "to all": hvd.alltoall(torch.arange(4) + 10 * rank),
        "split": hvd.alltoall(torch.arange(4) + 10 * rank, splits=[1, 3]),
        "scattered": hvd.reducescatter(torch.arange(3.0) + rank, op=hvd.Sum),
        "object": hvd.broadcast_object({"rank": rank}, root_rank=1),
        "objects": hvd.allgather_object({"rank": rank}),
        "unchanged": values,
    }
    handle = hvd.allreduce_async_(in_place := values.clone(), op=hvd.Sum)
    deadline = time.monotonic() + 30
    while not hvd.poll(handle) and time.monotonic() < deadline:
        time.sleep(0.001)
    results["polled"], results["in place"] = hvd.poll(handle), hvd.synchronize(handle) is in_place
    results["in place too"] = in_place
    rows = torch.sparse_coo_tensor(torch.tensor([[rank, 2]]), torch.ones(2), (4,))
    results["sparse"] = hvd.synchronize(hvd.sparse_allreduce_async(rows, "rows", hvd.Sum)).to_dense()
    leaf = values.clone().requires_grad_()
    (hvd.allreduce(leaf, op=hvd.Sum) * (rank + 1)).sum().backward()
    results["gradient"] = leaf.grad
    leaf = torch.ones(rank + 1, requires_grad=True)
    (hvd.allgather(leaf) * torch.tensor([1.0, 2.0, 4.0])).sum().backward()
    results["gathered gradient"] = leaf.grad
    only = hvd.add_process_set([1])
    results["set"] = (only.included(), only.size())
    if only.included():
        results["in the set"] = hvd.allreduce(values, op=hvd.Sum, process_set=only)
    else:
        results["in the set"] = raised(HorovodError, lambda: hvd.allreduce(values, process_set=only))
    hvd.barrier()
    results["removed"] = hvd.remove_process_set(only)
    results["elastic"] = raised(AttributeError, lambda: hvd.elastic)
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.tolist, results)  # type: ignore[no-any-return]


def test_every_collective_has_the_documented_result() -> None:
    for rank, results in enumerate(run_ranks(collectives, 2)):
        assert results["place"] == (2, rank, 2, rank, 1, 0)
        assert results["average"] == results["half"] == [0.5, 1.5, 2.5, 3.5]
        assert results["sum"] == results["older"] == results["in place too"] == [1, 3, 5, 7]
        assert results["min"] == [0, 1, 2, 3]
        assert results["max"] == results["root's"] == [1, 2, 3, 4]
        assert results["product"] == [0, 2, 6, 12]
        assert results["scaled"] == [20, 60, 100, 140]
        assert results["whole"] == [3]
        assert results["grouped"] == [[0.5, 1.5, 2.5, 3.5], [1.5, 2.5, 3.5, 4.5]]
        assert results["gathered"] == [[0, 0], [1, 1], [1, 1]]
        assert results["to all"] == [[0, 1, 10, 11], [2, 3, 12, 13]][rank]
        assert list(results["split"]) == [[[0, 10], [1, 1]], [[1, 2, 3, 11, 12, 13], [3, 3]]][rank]
        assert results["scattered"] == [[1, 3], [5]][rank]
        assert results["object"] == {"rank": 1}
        assert results["objects"] == [{"rank": 0}, {"rank": 1}]
        assert results["unchanged"] == [rank, rank + 1, rank + 2, rank + 3]
        assert results["polled"]
        assert results["in place"]
        assert results["sparse"] == [1, 1, 2, 0]
        assert results["gradient"] == [3, 3, 3, 3]
        assert results["gathered gradient"] == [[1], [2, 4]][rank]
        assert results["set"] == (rank == 1, 1)
        assert results["in the set"] == [1, 2, 3, 4] if rank else "not in the process set" in results["in the set"]
        assert results["removed"]
        assert "torchrun" in results["elastic"]


def same_start(rank: int, ranks: int) -> list[Any]:
    hvd.init()
    torch.manual_seed(rank)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    if rank == 0:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_parameters(list(model.named_parameters()), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    state = optimizer.state_dict()
    moments = [entry[key].tolist() for entry in state["state"].values() for key in sorted(entry)]
    wrong = raised(HorovodError, lambda: hvd.broadcast_parameters([1, 2], root_rank=0))  # type: ignore[list-item]
    return [[p.tolist() for p in model.parameters()], state["param_groups"][0]["lr"], moments, "state_dict" in wrong]


def test_every_rank_starts_with_the_roots_state() -> None:
    first, second = run_ranks(same_start, 2)
    assert first == second
    assert first[1] == 0.1
    assert len(first[2]) == 6
    assert first[3]
