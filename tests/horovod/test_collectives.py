"""Horovod's collectives as a script for `horovod.torch` calls them."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import ddpobs.horovod as hvd
from benchmarks.rig import patience
from ddpobs.errors import HorovodError
from tests.support.distributed.compare import grad
from tests.support.distributed.horovod import raised
from tests.support.distributed.launch import run_ranks


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
    deadline = time.monotonic() + patience.HANG_S
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
    results["sets"] = [str(hvd.global_process_set), str(only)]
    for name, wrong in (("again", [1]), ("everyone", [1, 0]), ("unknown", [2])):
        results[name] = raised(HorovodError, partial(hvd.add_process_set, wrong))
    other = hvd.add_process_set(hvd.ProcessSet([0]))
    results["removed"] = hvd.remove_process_set(only), hvd.remove_process_set(only)
    results["ids"] = other.process_set_id, only.process_set_id, hvd.add_process_set(only).process_set_id
    results["global"] = hvd.remove_process_set(hvd.global_process_set), hvd.global_process_set.process_set_id
    parameters = torch.nn.Linear(1, 2)
    torch.nn.init.constant_(parameters.weight, rank)
    hvd.broadcast_parameters(list(parameters.parameters()), root_rank=1)
    results["parameters"] = parameters.weight.detach()
    results["joined"] = hvd.join() in (0, 1)
    results["normalized"] = normalized(rank)
    results["callbacks"] = raised(AttributeError, lambda: hvd.callbacks)
    results["mpi_ops"] = hvd.mpi_ops.Sum == hvd.Sum
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
        assert results["sets"] == [
            "ProcessSet(process_set_id=0, ranks=[0, 1], mpi_comm=None)",
            "ProcessSet(process_set_id=1, ranks=[1], mpi_comm=None)",
        ]
        assert "exists already" in results["again"]
        assert "exists already" in results["everyone"]
        assert "below 2" in results["unknown"]
        assert results["removed"] == (True, False)
        assert results["ids"] == (2, None, 1)
        assert results["global"] == (False, 0)
        assert results["parameters"] == [[1], [1]]
        assert results["joined"]
        assert results["normalized"] == "equal"
        assert "broadcast_parameters" in results["callbacks"]
        assert results["mpi_ops"]


def normalized(rank: int) -> str:
    """Compare SyncBatchNorm on batches of 2 and 3 samples with BatchNorm on both batches at once."""
    torch.manual_seed(0)
    inputs = [torch.randn(size, 3, 2, 2, requires_grad=True) for size in (2, 3)]
    factors = [torch.randn(size, 3, 2, 2) for size in (2, 3)]
    ours, theirs = hvd.SyncBatchNorm(3), nn.BatchNorm2d(3)
    joined = torch.cat(inputs)
    expected = theirs(joined)
    joined.retain_grad()
    (expected * torch.cat(factors)).sum().backward()
    expected_gradient = grad(joined).split([2, 3])[rank]
    own = inputs[rank].detach().requires_grad_()
    output = ours(own)
    (output * factors[rank]).sum().backward()
    pairs = [(output, expected.split([2, 3])[rank]), (grad(own), expected_gradient)]
    pairs += [
        (hvd.allreduce(grad(a), op=hvd.Sum), grad(b))
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    ]
    pairs += list(zip(ours.buffers(), theirs.buffers(), strict=True))
    pairs.append((ours.eval()(own), theirs.eval()(own)))
    wrong = [index for index, (a, b) in enumerate(pairs) if not torch.allclose(a, b, atol=1e-6)]
    return "equal" if not wrong else f"pairs {wrong} differ"


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


def zeros(rank: int, ranks: int) -> list[Any]:
    hvd.init()
    model = nn.ModuleDict({"table": nn.Embedding(4, 2, sparse=True), "layer": nn.Linear(2, 2)})
    model["layer"].bias.requires_grad_(False)
    hvd.broadcast_optimizer_state(torch.optim.SGD(model.parameters(), lr=0.1), root_rank=0, model=model)
    gradients = [(name, parameter.grad) for name, parameter in model.named_parameters()]
    return [(name, one is not None and (one.is_sparse, float(one.to_dense().sum()))) for name, one in gradients]


def test_a_broadcast_of_an_empty_state_leaves_zeros_as_gradients() -> None:
    expected = [("table.weight", (True, 0.0)), ("layer.weight", (False, 0.0)), ("layer.bias", False)]
    assert run_ranks(zeros, 2) == [expected] * 2
