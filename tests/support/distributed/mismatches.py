"""Collectives that differ between ranks, and their errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import ddpobs.horovod as hvd

Calls = Callable[[int], Any]
"""A collective as a rank calls it."""
Cases = Mapping[str, tuple[Calls, tuple[str, ...]]]


def floats(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


def ints(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.int32)


def of_rank(rank: int, first: Any, others: Any) -> Any:
    return first if rank == 0 else others


def halved(rank: int) -> Any:
    return of_rank(rank, hvd.Compression.none, hvd.Compression.fp16)


def dtypes(rank: int) -> torch.Tensor:
    return of_rank(rank, floats(3), ints(3))  # type: ignore[no-any-return]


def shapes(rank: int) -> torch.Tensor:
    return of_rank(rank, floats(3), floats(2, 2))  # type: ignore[no-any-return]


def columns(rank: int) -> torch.Tensor:
    return floats(2 + 2 * rank, 3 + (rank > 0))


def sparse(rank: int, length: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1, dtype=dtype), (length,), check_invariants=True)


def optimizer() -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(floats(1))], lr=0.1))


def gradient(rank: int) -> None:
    total = hvd.allreduce(floats(3).requires_grad_())
    if rank == 0:
        total.sum().backward()
    else:
        hvd.barrier()


DTYPES, SHAPES, BOTH = "float32[3]", "[2, 2]", ("rank 0: float32[3]", "1: int32[3]")
CASES: Cases = {
    "allreduce dtype": (lambda r: hvd.allreduce(dtypes(r)), ("Mismatched data types in allreduce", *BOTH)),
    "allreduce shape": (
        lambda r: hvd.allreduce(shapes(r)),
        ("Mismatched allreduce tensor shapes", "rank 0: float32[3]", "1: float32[2, 2]"),
    ),
    "allreduce op": (
        lambda r: hvd.allreduce(floats(3), op=of_rank(r, hvd.Sum, hvd.Average), name="x"),
        ("Mismatched reduction operation in allreduce 'x'", "rank 0: Sum", "1: Average"),
    ),
    "allreduce op of one dtype": (
        lambda r: hvd.allreduce(floats(3), op=of_rank(r, hvd.Min, hvd.Max)),
        ("Mismatched reduction operation", "rank 0: Min", "1: Max"),
    ),
    "allreduce factors": (
        lambda r: hvd.allreduce(floats(3), prescale_factor=1.0 + r),
        ("Mismatched prescale and/or postscale factors", "rank 0: (1.0, 1.0)", "(2.0, 1.0)"),
    ),
    "allreduce compression": (
        lambda r: hvd.allreduce(floats(3), compression=halved(r)),
        ("Mismatched data types", "rank 0: float32[3]", "1: float16[3]"),
    ),
    "allreduce compression without effect": (
        lambda r: hvd.allreduce(ints(3), compression=halved(r)),
        ("Mismatched compression", "rank 0: NoneCompressor", "1: FP16Compressor"),
    ),
    "allreduce_": (lambda r: hvd.allreduce_(dtypes(r)), BOTH),
    "allreduce_async": (lambda r: hvd.synchronize(hvd.allreduce_async(dtypes(r), name="g")), BOTH),
    "allreduce_async_": (lambda r: hvd.synchronize(hvd.allreduce_async_(shapes(r))), (DTYPES, SHAPES)),
    "grouped_allreduce": (lambda r: hvd.grouped_allreduce([floats(1), dtypes(r)], name="g"), ("'g.1'", *BOTH)),
    "grouped_allreduce_": (lambda r: hvd.grouped_allreduce_([floats(1), shapes(r)]), (DTYPES, SHAPES)),
    "grouped_allreduce_async number": (
        lambda r: hvd.synchronize(hvd.grouped_allreduce_async([floats(1)] * (2 + (r > 0)))),
        ("numbers of tensors", "rank 0: 2 tensors", "1: 3 tensors"),
    ),
    "sparse_allreduce shape": (
        lambda r: hvd.synchronize(hvd.sparse_allreduce_async(sparse(r, 4 + (r > 0)), "rows", hvd.Sum)),
        ("Mismatched sparse_allreduce tensor shapes in sparse_allreduce 'rows'", "rank 0: float32[4]", "1: float32[5]"),
    ),
    "sparse_allreduce dtype": (
        lambda r: hvd.sparse_allreduce_async(sparse(r, 4, of_rank(r, torch.float32, torch.float64)), "rows"),
        ("Mismatched data types", "float32[4]", "float64[4]"),
    ),
    "sparse and dense": (
        lambda r: of_rank(r, lambda: hvd.sparse_allreduce_async(sparse(r), "x"), lambda: hvd.allreduce(floats(4)))(),
        ("Mismatched operations", "rank 0: sparse_allreduce 'x' of float32[4]", "1: allreduce of float32[4]"),
    ),
    "allgather dtype": (lambda r: hvd.allgather(dtypes(r)), ("rank 0: float32[any]", "1: int32[any]")),
    "allgather columns": (
        lambda r: hvd.allgather(columns(r), name="rows"),
        ("Mismatched allgather tensor shapes in allgather 'rows'", "rank 0: float32[any, 3]", "1: float32[any, 4]"),
    ),
    "allgather dimensions": (lambda r: hvd.synchronize(hvd.allgather_async(shapes(r))), ("[any]", "[any, 2]")),
    "grouped_allgather": (lambda r: hvd.grouped_allgather([floats(1), columns(r)]), ("[any, 3]", "[any, 4]")),
    "broadcast dtype": (lambda r: hvd.broadcast(dtypes(r), 0), ("Mismatched data types in broadcast", *BOTH)),
    "broadcast shape": (lambda r: hvd.broadcast_(shapes(r), 0), ("Mismatched broadcast tensor shapes", SHAPES)),
    "broadcast root": (
        lambda r: hvd.broadcast(floats(3), root_rank=min(r, 1), name="w"),
        ("Mismatched broadcast root ranks in broadcast 'w'", "rank 0: 0", "1: 1"),
    ),
    "broadcast_async_ root": (
        lambda r: hvd.synchronize(hvd.broadcast_async_(floats(3), min(r, 1))),
        ("root ranks", "rank 0: 0"),
    ),
    "alltoall dtype": (lambda r: hvd.alltoall(of_rank(r, floats(6), ints(6))), ("float32[any]", "int32[any]")),
    "alltoall columns": (lambda r: hvd.alltoall(floats(6, 1 + (r > 0))), ("alltoall tensor shapes", "[any, 2]")),
    "alltoall_async columns": (lambda r: hvd.alltoall_async(floats(6, 1 + (r > 0))), ("[any, 1]", "[any, 2]")),
    "reducescatter dtype": (lambda r: hvd.reducescatter(dtypes(r)), ("Mismatched data types in reducescatter", *BOTH)),
    "reducescatter shape": (lambda r: hvd.reducescatter(shapes(r)), ("Mismatched reducescatter", DTYPES, SHAPES)),
    "reducescatter op": (
        lambda r: hvd.synchronize(hvd.reducescatter_async(floats(3), op=of_rank(r, hvd.Sum, hvd.Average))),
        ("reduction operation", "rank 0: Sum", "1: Average"),
    ),
    "grouped_reducescatter": (lambda r: hvd.grouped_reducescatter([floats(3), dtypes(r)]), BOTH),
    "allreduce and allgather": (
        lambda r: of_rank(r, hvd.allreduce, hvd.allgather)(floats(3), name="x"),
        ("Mismatched operations", "rank 0: allreduce 'x' of float32[3]", "1: allgather 'x' of float32[any]"),
    ),
    "two names": (
        lambda r: hvd.allreduce(floats(3), name=of_rank(r, "x", "y")),
        ("rank 0: allreduce 'x'", "1: allreduce 'y'", "in the same order"),
    ),
    "a name and none": (lambda r: hvd.allreduce(floats(3), name=of_rank(r, "x", None)), ("rank 0: allreduce 'x' of",)),
    "barrier": (lambda r: of_rank(r, hvd.barrier, lambda: hvd.allreduce(floats(3)))(), ("rank 0: barrier",)),
    "broadcast_object root": (
        lambda r: hvd.broadcast_object("x", root_rank=min(r, 1)),
        ("Mismatched broadcast_object root ranks", "rank 0: 0", "1: 1"),
    ),
    "allgather_object": (
        lambda r: of_rank(r, hvd.allgather_object, hvd.broadcast_object)("x"),
        ("rank 0: allgather_object", "1: broadcast_object"),
    ),
    "add_process_set": (
        lambda r: hvd.add_process_set(of_rank(r, [0], [1])),
        ("Mismatched ranks in add_process_set", "rank 0: (0,)", "1: (1,)"),
    ),
    "broadcast_parameters names": (
        lambda r: hvd.broadcast_parameters({of_rank(r, "a", "b"): floats(3), "c": floats(1)}, 0),
        ("Mismatched names in broadcast_parameters", "rank 0: a float32[3]", "1: b float32[3]"),
    ),
    "broadcast_parameters shape": (
        lambda r: hvd.broadcast_parameters([("a", floats(1)), ("w", shapes(r))], 0),
        ("Mismatched broadcast_parameters tensor shapes", "rank 0: w float32[3]", "1: w float32[2, 2]"),
    ),
    "broadcast_parameters dtype": (
        lambda r: hvd.broadcast_parameters([dtypes(r)], 0),
        ("Mismatched data types in broadcast_parameters", *BOTH),
    ),
    "broadcast_parameters number": (
        lambda r: hvd.broadcast_parameters([("a", floats(1)), ("b", floats(1))][: 2 - (r > 0)], 0),
        ("numbers of tensors", "rank 0: 2 tensors", "1: 1 tensors"),
    ),
    "broadcast_parameters root": (
        lambda r: hvd.broadcast_parameters([("a", floats(1))], min(r, 1)),
        ("Mismatched broadcast_parameters root ranks", "rank 0: 0", "1: 1"),
    ),
    "broadcast_optimizer_state root": (
        lambda r: hvd.broadcast_optimizer_state(torch.optim.SGD([floats(1)], lr=0.1), min(r, 1)),
        ("'broadcast_optimizer_state'", "root ranks", "rank 0: 0"),
    ),
    "DistributedOptimizer": (
        lambda r: of_rank(r, optimizer, lambda: hvd.allreduce(floats(3)))(),
        ("rank 0: DistributedOptimizer", "1: allreduce of float32[3]"),
    ),
    "a gradient's": (gradient, ("rank 0: allreduce of float32[3]", "1: barrier")),
}
"""By name: a call that differs between rank 0 and the others, and what the message says."""


def collect(cases: Cases, rank: int, ranks: int) -> dict[str, str]:
    """Each case's error on this rank. After each, the ranks agree on a collective again."""
    found = {}
    for name, (call, _) in cases.items():
        try:
            call(rank)
        except hvd.HorovodInternalError as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = "no error"
        total = hvd.allreduce(floats(2) + rank, op=hvd.Sum)
        assert total.tolist() == [sum(range(1, ranks + 1))] * 2, name
    return found


def check(cases: Cases, by_rank: list[dict[str, str]]) -> None:
    for name, (_, texts) in cases.items():
        errors = [found[name] for found in by_rank]
        assert len(set(errors)) == 1, errors
        for text in ("MismatchError", *texts):
            expected = text if len(by_rank) == 2 else text.replace("1: ", "ranks 1, 2: ")
            assert expected in errors[0], f"{name}: {errors[0]}"


def learn(*calls: Callable[[], Any]) -> None:
    """Repeat collectives until every rank expects them, and starts them without an exchange."""
    for _ in range(12):
        for call in calls:
            call()
