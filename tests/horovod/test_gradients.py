"""Gradients through Horovod's collectives, compared with results by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ddpobs.horovod as hvd
from tests.support.distributed.launch import run_ranks

ROWS = 3
COLLECTIVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "broadcast": lambda rows: hvd.broadcast(rows, root_rank=1),
    "average": hvd.allreduce,
    "sum": lambda rows: hvd.allreduce(rows, op=hvd.Sum),
    "scaled": lambda rows: hvd.allreduce(rows, op=hvd.Sum, prescale_factor=2.0, postscale_factor=10.0),
    "half": lambda rows: hvd.allreduce(rows, compression=hvd.Compression.fp16),
    "grouped": lambda rows: hvd.grouped_allreduce([rows], op=hvd.Sum)[0],
    "gathered": hvd.allgather,
    "gathered in a group": lambda rows: hvd.grouped_allgather([rows])[0],
    "to all": lambda rows: hvd.alltoall(torch.cat([rows, rows[:1]])),
    "split": lambda rows: hvd.alltoall(rows, splits=[1, 2])[0],
    "all to one": lambda rows: hvd.alltoall(rows, splits=[0, 3])[0],
    "reduced and scattered": hvd.reducescatter,
    "summed and scattered": lambda rows: hvd.reducescatter(rows, op=hvd.Sum),
    "scattered in a group": lambda rows: hvd.grouped_reducescatter([rows], op=hvd.Sum)[0],
}
BY_HAND: dict[str, list[list[float]]] = {
    "broadcast": [[0, 0, 0], [5.5, 11, 16.5]],
    "average": [[5.5, 11, 16.5]] * 2,
    "sum": [[11, 22, 33]] * 2,
    "scaled": [[220, 440, 660]] * 2,
    "half": [[5.5, 11, 16.5]] * 2,
    "grouped": [[11, 22, 33]] * 2,
    "gathered": [[5.5, 11, 16.5], [22, 27.5, 33]],
    "gathered in a group": [[5.5, 11, 16.5], [22, 27.5, 33]],
    "to all": [[1 + 20, 2, 10], [3 + 40, 4, 30]],
    "split": [[1, 10, 20], [2, 30, 40]],
    "all to one": [[10, 20, 30], [40, 50, 60]],
    "reduced and scattered": [[1, 2, 10]] * 2,
    "summed and scattered": [[2, 4, 20]] * 2,
    "scattered in a group": [[2, 4, 20]] * 2,
}
"""By rank, for the result's gradient 1, 2, ... on rank 0 and 10, 20, ... on rank 1."""


def gradients(rank: int, ranks: int) -> dict[str, list[float]]:
    hvd.init()
    results = {}
    for name, collective in COLLECTIVES.items():
        rows = torch.ones(ROWS, requires_grad=True)
        result = collective(rows)
        result.backward(torch.arange(1.0, len(result) + 1) * 10**rank)
        assert rows.grad is not None
        results[name] = rows.grad.tolist()
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, list[float]]]:
    """Each rank's gradients."""
    return run_ranks(gradients, 2)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_gradient_equals_the_one_by_hand(results: list[dict[str, list[float]]], name: str) -> None:
    assert [by_name[name] for by_name in results] == BY_HAND[name]
