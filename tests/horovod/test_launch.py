"""`hvd.run` calls a function on ranks that it starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ddpobs.horovod as hvd
from ddpobs.errors import HorovodError


def summed(values: list[float], scale: float) -> tuple[int, float]:
    hvd.init()
    return hvd.rank(), float(hvd.allreduce(torch.tensor(scale * values[hvd.rank()]), op=hvd.Sum))


def test_a_function_returns_its_results_by_rank() -> None:
    assert hvd.run(summed, ([1.0, 2.0],), {"scale": 2.0}, np=2, hosts="localhost:2") == [(0, 6.0), (1, 6.0)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "num_proc of at least 1, got None"),
        ({"num_proc": 2, "hosts": "far:2"}, "on this host"),
        ({"np": 2, "use_mpi": True}, "horovodrun"),
    ],
)
def test_ranks_that_cannot_start_here_are_a_clear_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(HorovodError, match=message):
        hvd.run(summed, **arguments)
