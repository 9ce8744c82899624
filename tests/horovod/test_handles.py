"""Horovod's collectives that return handles, work in place or take several tensors, against results by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

import ddpobs.horovod as hvd
from ddpobs.errors import HorovodError
from tests.support.distributed.horovod import raised
from tests.support.distributed.launch import run_ranks


def handles(rank: int, ranks: int) -> dict[str, Any]:
    hvd.init()
    values = torch.arange(4.0) + rank
    results: dict[str, Any] = {
        "sum": hvd.allreduce_async(values, op=hvd.Sum),
        "average": hvd.allreduce_async(values),
        "root's": hvd.broadcast_async(values, root_rank=1),
        "gathered": hvd.allgather_async(values[: 2 * rank + 1]),
        "gathered scalars": hvd.allgather_async(torch.tensor(rank)),
        "to all": hvd.alltoall_async(values),
        "split": hvd.alltoall_async(values, splits=torch.tensor([1, 3])),
        "scattered": hvd.reducescatter_async(values),
        "scattered sum": hvd.reducescatter_async(values, op=hvd.Sum),
        "group": hvd.grouped_allreduce_async([values, values + 1], op=hvd.Max),
        "sparse sum": hvd.sparse_allreduce_async(rows(rank), "rows", hvd.Sum),
        "sparse average": hvd.sparse_allreduce_async(rows(rank), "mean of rows", hvd.Average),
    }
    results = {name: handle() if "sparse" in name else hvd.synchronize(handle) for name, handle in results.items()}
    results = {name: result.to_dense() if "sparse" in name else result for name, result in results.items()}
    results["gathered group"] = hvd.grouped_allgather([values[:1], values[1:3]])
    results["scattered group"] = hvd.grouped_reducescatter([values, values + 1], op=hvd.Sum)
    results["unchanged"] = values
    results["sparse maximum"] = raised(HorovodError, lambda: hvd.sparse_allreduce_async(rows(rank), op=hvd.Max))
    results["scattered maximum"] = raised(HorovodError, lambda: hvd.reducescatter(values, op=hvd.Max))
    results["scattered Adasum"] = raised(NotImplementedError, lambda: hvd.reducescatter(values, op=hvd.Adasum))
    results["too few splits"] = raised(HorovodError, lambda: hvd.alltoall(values, splits=[4]))
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.tolist, results)  # type: ignore[no-any-return]


def rows(rank: int) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[rank, 2]]), torch.ones(2), (4,))


def test_handles_return_the_result_and_leave_the_input_unchanged() -> None:
    for rank, results in enumerate(run_ranks(handles, 2)):
        assert results["sum"] == [1, 3, 5, 7]
        assert results["average"] == [0.5, 1.5, 2.5, 3.5]
        assert results["root's"] == [1, 2, 3, 4]
        assert results["gathered"] == [0, 1, 2, 3]
        assert results["gathered scalars"] == [0, 1]
        assert results["to all"] == [[0, 1, 1, 2], [2, 3, 3, 4]][rank]
        assert list(results["split"]) == [[[0, 1], [1, 1]], [[1, 2, 3, 2, 3, 4], [3, 3]]][rank]
        assert results["scattered"] == [[0.5, 1.5], [2.5, 3.5]][rank]
        assert results["scattered sum"] == [[1, 3], [5, 7]][rank]
        assert results["group"] == [[1, 2, 3, 4], [2, 3, 4, 5]]
        assert results["gathered group"] == [[0, 1], [1, 2, 2, 3]]
        assert results["scattered group"] == [[[1, 3], [3, 5]], [[5, 7], [7, 9]]][rank]
        assert results["sparse sum"] == [1, 1, 2, 0]
        assert results["sparse average"] == [0.5, 0.5, 1, 0]
        assert results["unchanged"] == [rank, rank + 1, rank + 2, rank + 3]
        assert "got Max" in results["sparse maximum"]
        assert "got Max" in results["scattered maximum"]
        assert "use op=Average" in results["scattered Adasum"]
        assert "expected 2 splits" in results["too few splits"]


def named_alike(rank: int, ranks: int) -> Any:
    """Rank 1 comes when rank 0 has tried to take the name of a running reduction."""
    hvd.init()
    store = dist.distributed_c10d._get_default_store()
    for _ in range(20):  # So that the next call starts without an exchange.
        hvd.allreduce(torch.ones(2), name="loss")
    if rank == 1:
        store.wait(["refused"])
        return hvd.allreduce(torch.ones(2), name="loss").tolist()
    handle = hvd.allreduce_async(torch.ones(2), name="loss")
    refused = raised(HorovodError, lambda: hvd.allreduce_async(torch.ones(2), name="loss"))
    store.set("refused", "")
    return refused, hvd.synchronize(handle).tolist()


def test_a_name_is_refused_while_its_collective_runs() -> None:
    (refused, mean), other = run_ranks(named_alike, 2)
    assert refused.startswith("allreduce 'loss' was started and is not complete")
    assert mean == other == [1, 1]


def in_place(rank: int, ranks: int) -> dict[str, tuple[bool, list[Any]]]:
    """By call: whether its results are the input tensors, and their values."""
    hvd.init()

    def build() -> torch.Tensor:
        return torch.arange(4.0) + rank

    ours = {name: build() for name in ("allreduce_", "allreduce_async_", "broadcast_", "broadcast_async_")}
    pairs = {name: [build(), build() + 1] for name in ("grouped_allreduce_", "grouped_allreduce_async_")}
    results: dict[str, Any] = {
        "allreduce_": [hvd.allreduce_(ours["allreduce_"])],
        "allreduce_async_": [hvd.synchronize(hvd.allreduce_async_(ours["allreduce_async_"]))],
        "broadcast_": [hvd.broadcast_(ours["broadcast_"], 1)],
        "broadcast_async_": [hvd.synchronize(hvd.broadcast_async_(ours["broadcast_async_"], 1))],
        "grouped_allreduce_": hvd.grouped_allreduce_(pairs["grouped_allreduce_"]),
        "grouped_allreduce_async_": hvd.synchronize(hvd.grouped_allreduce_async_(pairs["grouped_allreduce_async_"])),
    }
    summaries: dict[str, tuple[bool, list[Any]]] = {}
    for name, tensors in ({name: [tensor] for name, tensor in ours.items()} | pairs).items():
        same = all(result is tensor for result, tensor in zip(results[name], tensors, strict=True))
        summaries[name] = same, [tensor.tolist() for tensor in tensors]
    return summaries


def test_in_place_calls_return_their_input() -> None:
    mean, root = [0.5, 1.5, 2.5, 3.5], [1, 2, 3, 4]
    for results in run_ranks(in_place, 2):
        assert results == {
            "allreduce_": (True, [mean]),
            "allreduce_async_": (True, [mean]),
            "broadcast_": (True, [root]),
            "broadcast_async_": (True, [root]),
            "grouped_allreduce_": (True, [mean, [result + 1 for result in mean]]),
            "grouped_allreduce_async_": (True, [mean, [result + 1 for result in mean]]),
        }


def waited_for_twice(rank: int, ranks: int) -> list[bool]:
    hvd.init()
    values = torch.arange(4.0) + rank
    started = [
        hvd.allreduce_async(values),
        hvd.grouped_allreduce_async([values, values], postscale_factor=2.0),
        hvd.reducescatter_async(values),
    ]
    first = [pytree.tree_map(torch.clone, hvd.synchronize(handle)) for handle in started]
    again = [hvd.synchronize(handle) for handle in started]
    pairs = zip(pytree.tree_leaves(first), pytree.tree_leaves(again), strict=True)
    return [*(torch.equal(a, b) for a, b in pairs), *map(hvd.poll, started)]


def test_a_handle_returns_the_same_result_twice() -> None:
    assert run_ranks(waited_for_twice, 2) == [[True] * 7] * 2


def in_a_part(rank: int, ranks: int) -> dict[str, list[Any]]:
    """A column of a matrix is neither contiguous nor dense; the memory between its elements must not change."""
    hvd.init()
    results = {}
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        "allreduce_": lambda column: hvd.allreduce_(column, op=hvd.Sum),
        "allreduce_async_": lambda column: hvd.synchronize(hvd.allreduce_async_(column, op=hvd.Sum)),
        "broadcast_": lambda column: hvd.broadcast_(column, 1),
        "broadcast_parameters": lambda column: hvd.broadcast_parameters({"column": column}, 1),
    }
    for name, call in calls.items():
        matrix = torch.zeros(3, 2) + rank
        call(matrix[:, 1])
        results[name] = matrix.tolist()
    return results


def test_in_place_in_a_part_of_a_tensor_leaves_the_rest() -> None:
    for rank, results in enumerate(run_ranks(in_a_part, 2)):
        assert results == {name: [[rank, 1.0]] * 3 for name in results}


def whole_numbers(rank: int, ranks: int) -> list[Any]:
    hvd.init()
    values = torch.tensor([3 + rank, 2**40])
    halved = hvd.allreduce(values, op=hvd.Sum, prescale_factor=0.5)
    return [halved.tolist(), hvd.allreduce(values, op=hvd.Sum, postscale_factor=2.5).tolist()]


def test_whole_numbers_may_be_scaled() -> None:
    assert run_ranks(whole_numbers, 2) == [[[3, 2**40], [17, 5 * 2**40]]] * 2


def scattered(rank: int, ranks: int) -> dict[str, Any]:
    hvd.init()
    values = torch.arange(4.0) + rank
    leaf = values.clone().requires_grad_()
    half = hvd.reducescatter(leaf, "named", hvd.Compression.fp16, hvd.Sum)
    half.sum().backward()
    factored = values.clone().requires_grad_()
    scaled = hvd.reducescatter(factored, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0)
    scaled.sum().backward()
    factors: dict[str, Any] = {"prescale_factor": 2.0, "postscale_factor": 3.0}
    results: dict[str, Any] = {
        "by place": half.detach(),
        "gradient": leaf.grad,
        "scaled": scaled.detach(),
        "scaled gradient": factored.grad,
        "scaled later": hvd.synchronize(hvd.reducescatter_async(values, op=hvd.Sum, **factors)),
        "scaled group": hvd.grouped_reducescatter([values], op=hvd.Sum, **factors),
        "group": hvd.synchronize(hvd.grouped_reducescatter_async([values, values + 1], op=hvd.Sum)),
        "gathered group": hvd.synchronize(hvd.grouped_allgather_async([values[:1], values[1:3]])),
        "compressed group": hvd.grouped_reducescatter([values], compression=hvd.Compression.fp16),
    }
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.tolist, results)  # type: ignore[no-any-return]


def test_a_reducescatter_takes_a_compression_where_horovods_does_and_groups_have_handles() -> None:
    for rank, results in enumerate(run_ranks(scattered, 2)):
        assert results == {
            "by place": [[1, 3], [5, 7]][rank],
            "gradient": [2, 2, 2, 2],
            "scaled": [[6, 18], [30, 42]][rank],
            "scaled gradient": [12, 12, 12, 12],
            "scaled later": [[6, 18], [30, 42]][rank],
            "scaled group": [[[6, 18]], [[30, 42]]][rank],
            "group": [[[1, 3], [3, 5]], [[5, 7], [7, 9]]][rank],
            "gathered group": [[0, 1], [1, 2, 2, 3]],
            "compressed group": [[[0.5, 1.5]], [[2.5, 3.5]]][rank],
        }
