"""Horovod's collectives after a mismatch, in `join` and elastic trainings; of rare dtypes; and their exchanges."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import ddpobs.horovod as hvd
from ddpobs.errors import HorovodError
from ddpobs.horovod.agreement import Agreement
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.mismatches import dtypes, floats, learn, optimizer


def others(rank: int, ranks: int) -> dict[str, Any]:
    """What goes on after a mismatch, in `join` and in an elastic training; and dtypes that gloo does not know."""
    hvd.init()
    return {
        "join": in_join(rank),
        "elastic": elastic(rank),
        "dtypes": of_every_dtype(rank),
        "refused": refused(),
    } | exchanged()


def in_join(rank: int) -> list[Any]:
    """Rank 0 is out of data while rank 1 calls a collective."""
    distributed = optimizer()
    message = ""
    if rank == 1:
        with pytest.raises(hvd.MismatchError) as error:
            hvd.allreduce(floats(3), name="metric")
        message = str(error.value)
    hvd.join()
    total = hvd.allreduce(floats(1), op=hvd.Sum).item()
    del distributed
    return [message, total]


def elastic(rank: int) -> list[Any]:
    """Rank 1 fails while rank 0 waits in a collective, and for consent to another; later the ranks' tensors differ."""
    calls = []
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank)

    def known() -> None:
        hvd.allreduce(floats(3), name="known")

    @hvd.elastic.run
    def train(_: Any) -> None:
        calls.append(rank)
        if len(calls) == 1:
            learn(known)
        if len(calls) < 3 and rank == 1:
            raise hvd.HorovodInternalError("the network fails")
        if len(calls) == 1:
            known()
        hvd.allreduce(floats(3), name="new")
        hvd.allreduce(dtypes(rank), name="wrong")

    with pytest.raises(hvd.MismatchError) as error:
        train(state)
    return [len(calls), str(error.value)]


def of_every_dtype(rank: int) -> list[Any]:
    """Move tensors of dtypes that Horovod moves, and of others; the indices of the wrong results."""
    wrong = []
    for dtype in (torch.int16, torch.uint16, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn):
        both = [torch.arange(2).to(dtype), torch.tensor([1, 0]).to(dtype)]
        mine, rows = both[rank], [each.view(2, 1) for each in both]
        results = (
            (hvd.broadcast(mine, 1), both[1]),
            (hvd.allgather(rows[rank]), torch.stack(both).view(4, 1)),
            (hvd.alltoall(rows[rank]), torch.stack([both[0][rank], both[1][rank]]).view(2, 1)),
        )
        for index, (result, expected) in enumerate(results):
            if result.dtype != dtype or not torch.equal(result.view(torch.uint8), expected.view(torch.uint8)):
                wrong.append((str(dtype), index, str(result)))
    return wrong


def refused() -> list[str]:
    messages = []
    for dtype, op in ((torch.int16, hvd.Sum), (torch.bool, hvd.Average), (torch.complex64, hvd.Min)):
        with pytest.raises(HorovodError) as error:
            hvd.allreduce(torch.ones(2).to(dtype), op=op)
        messages.append(str(error.value))
    return messages


def exchanged() -> dict[str, list[int]]:
    """How many collectives of each round are exchanged: steps, and every third time an evaluation."""
    counts: list[int] = []
    exchange = Agreement._exchange

    def count(self: Agreement, call: Any) -> None:
        counts[-1] += 1
        exchange(self, call)

    with mock.patch.object(Agreement, "_exchange", count):
        for number in range(12):
            counts.append(0)
            for _ in range(4):
                for size in (1, 1, 2):
                    hvd.allreduce(floats(size))
                hvd.allreduce(floats(1 + number), name="of changing shape")
            if number % 3 == 2:
                hvd.allreduce(floats(5), name="accuracy")
    return {"exchanged": counts}


def test_a_mismatch_leaves_join_and_elastic_trainings_in_order() -> None:
    first, second = run_ranks(others, 2)
    assert "rank 0 is out of data, in join" in second["join"][0]
    assert "allreduce 'metric' of float32[3]" in second["join"][0]
    assert first["join"][1] == second["join"][1] == 2
    assert first["elastic"] == second["elastic"]
    assert first["elastic"][0] == 3  # The mismatch is not tried again.
    assert "rank 0: float32[3], rank 1: int32[3]" in first["elastic"][1]
    assert first["dtypes"] == second["dtypes"] == []
    assert first["refused"] == second["refused"]
    # Of 16 collectives and an evaluation: the changed shape, and the places where evaluation begins and has ended.
    assert first["exchanged"][-6:] == second["exchanged"][-6:] == [4, 1, 2, 4, 1, 2]
    for message, text in zip(first["refused"], ("int16: use tensor.to(torch.int32)", "bool", "complex64"), strict=True):
        assert text in message
