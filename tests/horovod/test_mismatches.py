"""Ranks that call different collectives, or one with different tensors or arguments: every rank raises one error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ddpobs.horovod as hvd
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.mismatches import CASES, Cases, check, collect, dtypes, floats, ints, learn, of_rank


def messages(rank: int, ranks: int) -> dict[str, str]:
    hvd.init()
    return collect(CASES, rank, ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_raises_one_error_with_both_sides_values_and_goes_on(ranks: int) -> None:
    check(CASES, run_ranks(messages, ranks))


def changed(rank: int, first: Callable[[], Any], then: Callable[[], Any]) -> Any:
    """Repeat a collective on every rank; then rank 0 calls another one, and the others the first once more."""
    learn(first)
    return of_rank(rank, then, first)()


def handles(rank: int) -> list[Any]:
    """Start three collectives before the first wait; on rank 0 the second differs."""

    def first(name: str, tensor: Any) -> Any:
        return hvd.allreduce_async(tensor, name=name)

    learn(lambda: [handle.wait() for handle in [first(name, floats(3)) for name in "abc"]])
    return [handle.wait() for handle in [first("a", floats(3)), first("b", dtypes(-rank)), first("c", floats(3))]]


def polled(rank: int) -> Any:
    learn(lambda: hvd.allreduce(floats(3)))
    if rank == 0:
        return hvd.allreduce(ints(3))
    handle = hvd.allreduce_async(floats(3))
    while not hvd.poll(handle):
        pass
    return hvd.synchronize(handle)


def swapped(rank: int) -> None:
    """Call two collectives with the same tensors in another order."""
    x, y = (lambda: hvd.allreduce(floats(3), name="x")), (lambda: hvd.allreduce(floats(3), name="y"))
    learn(x, y)
    for call in of_rank(rank, (y, x), (x, y)):
        call()


def in_two_sets(rank: int) -> Any:
    """Rank 0 waits for rank 1 in one process set, and rank 1 for rank 0 in another."""
    pair = hvd.add_process_set([0, 1])
    learn(lambda: hvd.allreduce(floats(3)))
    return hvd.allreduce(floats(3), process_set=pair if rank == 0 else hvd.global_process_set)


LATER: Cases = {
    "dtype": (
        lambda r: changed(r, lambda: hvd.allreduce(floats(3), name="x"), lambda: hvd.allreduce(ints(3), name="x")),
        ("Mismatched data types in allreduce 'x'", "rank 0: int32[3]", "1: float32[3]"),
    ),
    "shape": (
        lambda r: changed(r, lambda: hvd.allreduce(floats(3)), lambda: hvd.allreduce(floats(4))),
        ("rank 0: float32[4]", "1: float32[3]"),
    ),
    "root": (
        lambda r: changed(r, lambda: hvd.broadcast(floats(3), 0, "w"), lambda: hvd.broadcast(floats(3), 1, "w")),
        ("root ranks in broadcast 'w'", "rank 0: 1", "1: 0"),
    ),
    "op": (
        lambda r: changed(r, lambda: hvd.allreduce(floats(3)), lambda: hvd.allreduce(floats(3), op=hvd.Sum)),
        ("rank 0: Sum", "1: Average"),
    ),
    "columns": (
        lambda r: changed(r, lambda: hvd.allgather(floats(3, 2)), lambda: hvd.allgather(floats(3, 3))),
        ("[any, 3]", "[any, 2]"),
    ),
    "rows for all": (
        lambda r: changed(r, lambda: hvd.alltoall(floats(6)), lambda: hvd.alltoall(ints(6))),
        ("rank 0: int32[any]", "1: float32[any]"),
    ),
    "object": (
        lambda r: changed(r, lambda: hvd.broadcast_object(1), lambda: hvd.allgather_object(1)),
        ("rank 0: allgather_object", "1: broadcast_object"),
    ),
    "barrier": (
        lambda r: changed(r, hvd.barrier, lambda: hvd.allreduce(floats(3))),
        ("rank 0: allreduce", "1: barrier"),
    ),
    "handles": (handles, ("rank 0: ", "allreduce 'b'")),
    "polled": (polled, ("rank 0: int32[3]", "1: float32[3]")),
    "swapped": (swapped, ("rank 0: allreduce 'y' of float32[3]", "1: allreduce 'x' of float32[3]")),
}
"""By name: calls on which the ranks agreed before, and what the message says."""


TWO_SETS: Cases = {
    "two sets": (in_two_sets, ("Mismatched process sets", "rank 0: allreduce of float32[3] over ranks 0, 1"))
}


def later_messages(rank: int, ranks: int) -> dict[str, str]:
    hvd.init()
    return collect(LATER if ranks == 2 else {**LATER, **TWO_SETS}, rank, ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_changes_what_was_agreed_ends_the_wait_of_the_others(ranks: int) -> None:
    check(LATER if ranks == 2 else {**LATER, **TWO_SETS}, run_ranks(later_messages, ranks))
