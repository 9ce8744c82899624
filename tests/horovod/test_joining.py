"""Horovod's `join` without an optimizer: a rank out of data gives zeros to the others' all-reduces."""

from __future__ import annotations

from typing import Any

import torch

import ddpobs.horovod as hvd
from tests.support.distributed.horovod import raised
from tests.support.distributed.launch import run_ranks


def values(rank: int) -> torch.Tensor:
    return torch.arange(4.0) + rank


def reduced(rank: int) -> dict[str, Any]:
    mine = values(rank)
    return {
        "average": hvd.allreduce(mine, name="loss").tolist(),
        "factors": hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5).tolist(),
        "compressed": hvd.allreduce(mine, compression=hvd.Compression.fp16, op=hvd.Sum).tolist(),
        "whole numbers": hvd.allreduce(mine.long(), op=hvd.Sum).tolist(),
        "group": hvd.synchronize(hvd.grouped_allreduce_async([mine[:1], mine[1:]], name="group"))[1].tolist(),
    }


def one_after_the_other(rank: int, ranks: int) -> Any:
    """Rank 0 is out of data at once, rank 1 after a round that all know, rank 2 after another one."""
    hvd.init()
    reduced(rank)
    rounds = [reduced(rank) for _ in range(rank)]
    last = hvd.join()
    return rounds, last, hvd.allreduce(values(rank), op=hvd.Sum).tolist()


def expected(ranks: list[int]) -> dict[str, Any]:
    total = sum(values(rank) for rank in ranks)
    assert isinstance(total, torch.Tensor)
    return {
        "average": (total / 3).tolist(),
        "factors": total.tolist(),
        "compressed": total.tolist(),
        "whole numbers": total.tolist(),
        "group": (total / 3)[1:].tolist(),
    }


def test_ranks_out_of_data_give_zeros_to_the_others_all_reduces() -> None:
    first, second, third = run_ranks(one_after_the_other, 3)
    both, alone = expected([1, 2]), expected([2])
    assert first == ([], 2, [3, 6, 9, 12])
    assert second == ([both], 2, [3, 6, 9, 12])
    assert third == ([both, alone], 2, [3, 6, 9, 12])


def not_waited_for(rank: int, ranks: int) -> Any:
    """Rank 1 joins while a reduction of its own runs, which all ranks expect."""
    hvd.init()
    for _ in range(20):
        hvd.allreduce(torch.ones(2), name="loss")
    if rank == 0:
        return hvd.join(), hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist()
    handle = hvd.allreduce_async(torch.ones(2), name="loss")
    last = hvd.join()
    assert hvd.synchronize(handle).tolist() == [0.5, 0.5]
    return last, hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist()


def test_a_reduction_that_still_runs_at_a_join_ends_in_it() -> None:
    (first, total), (second, same) = run_ranks(not_waited_for, 2)
    assert first == second
    assert total == same == [2, 2]


def refused(rank: int, ranks: int) -> list[Any]:
    """Rank 1 calls collectives in which zeros would be wrong, new ones and expected ones."""
    hvd.init()
    mine = values(rank)
    messages: list[Any] = []
    for times in (0, 20):
        for _ in range(times):
            hvd.allgather(mine, name="rows")
        if rank == 1:
            messages.append(raised(hvd.MismatchError, lambda: hvd.allgather(mine, name="rows")))
            messages.append(raised(hvd.MismatchError, lambda: hvd.allreduce(mine, op=hvd.Max)))
            messages.append(hvd.allreduce(mine, op=hvd.Sum).tolist())
        messages.append(hvd.join())
    return messages


def test_other_collectives_raise_an_error_and_the_join_goes_on() -> None:
    first, second = run_ranks(refused, 2)
    assert first == [1, 1]
    for gathered, maximum, total, last in (second[:4], second[4:]):
        assert "rank 0 is out of data, in join" in gathered
        assert "allgather 'rows'" in gathered
        assert "allreduce of float32[4]" in maximum
        assert (total, last) == ([1, 2, 3, 4], 1)
