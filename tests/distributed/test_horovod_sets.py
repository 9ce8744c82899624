"""Horovod's start and end, sets of ranks, and parameters in groups of one's own."""

from __future__ import annotations

import os
import socket
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import ddpobs.horovod as hvd
from ddpobs.errors import HorovodError
from tests.distributed.compare import net
from tests.distributed.launch import run_ranks
from tests.distributed.test_horovod import alone, how_close, loss, raised, together
from tests.ports import free_port

PAIR = [0, 2]


def in_a_set(rank: int, ranks: int) -> dict[str, Any]:
    """Ranks 0 and 2 train together, and rank 1 by itself."""
    pair = hvd.ProcessSet(PAIR)
    hvd.init(process_sets=[pair])
    mine = torch.tensor([float(rank)])
    model, reference = net(), net()
    optimizer = together(model, rank, 3, process_set=pair)
    peers = PAIR if pair.included() else [rank]
    alone(reference, len(peers), 3, of=lambda model, place, number: loss(model, peers[place], number))
    found: dict[str, Any] = {"trained": how_close(model, reference), "reduces": optimizer._reducer is not None}
    found["outside"] = None if pair.included() else raised(HorovodError, lambda: hvd.allreduce(mine, process_set=pair))
    if pair.included():
        found["place"] = pair.rank(), pair.size()
        found["average"] = hvd.allreduce(mine, process_set=pair).tolist()
        found["gathered"] = hvd.allgather(mine, process_set=pair).tolist()
        found["root's"] = hvd.broadcast(mine, root_rank=2, process_set=pair).tolist()
        found["to all"] = hvd.alltoall(torch.tensor([0, 1]) + 10 * rank, process_set=pair).tolist()
        found["scattered"] = hvd.reducescatter(torch.tensor([1.0, 2.0]), op=hvd.Sum, process_set=pair).tolist()
        found["object"] = hvd.broadcast_object(rank, root_rank=2, process_set=pair)
        found["objects"] = hvd.allgather_object(rank, process_set=pair)
        hvd.barrier(pair)
    found["everyone"] = hvd.allreduce(mine, op=hvd.Sum).tolist()
    return found


def test_a_set_given_to_init_trains_and_talks_among_itself() -> None:
    first, outside, second = run_ranks(in_a_set, 3)
    assert first["trained"] == outside["trained"] == second["trained"] == "equal"
    assert (first["reduces"], outside["reduces"], second["reduces"]) == (True, False, True)
    assert first["everyone"] == outside["everyone"] == second["everyone"] == [3]
    assert "not of the process set" in outside["outside"]
    for place, found in enumerate((first, second)):
        assert found["place"] == (place, 2)
        assert found["average"] == [1]
        assert found["gathered"] == [0, 2]
        assert found["root's"] == [2]
        assert found["to all"] == [[0, 20], [1, 21]][place]
        assert found["scattered"] == [[2], [4]][place]
        assert found["object"] == 2
        assert found["objects"] == [0, 2]


def grouped(rank: int, ranks: int) -> dict[str, Any]:
    hvd.init()
    model, reference = net(), net()
    first, *_, last = parameters = list(model.parameters())
    optimizer = together(model, rank, 4, groups=[[first, last], parameters[2:4]])
    alone(reference, ranks, 4)
    twice = raised(
        HorovodError,
        lambda: hvd.DistributedOptimizer(torch.optim.SGD(parameters), groups=[[first], [first]]),
    )
    return {"how": how_close(model, reference), "buckets": optimizer._reducer.bucket_members, "twice": twice}


def test_parameters_of_a_group_travel_together_and_the_others_alone() -> None:
    for found in run_ranks(grouped, 2):
        assert found["how"] == "equal"
        assert sorted(map(sorted, found["buckets"])) == [[0, 5], [1], [2, 3], [4]]
        assert "one group only" in found["twice"]


def left_and_joined_again(rank: int, ranks: int, ports: list[int]) -> list[Any]:
    """First in a process group that was there, then in two that `init` makes."""
    found: list[Any] = []
    before = raised(HorovodError, hvd.size)
    hvd.init()
    hvd.shutdown()
    found.append((before == raised(HorovodError, hvd.rank), hvd.is_initialized(), dist.is_initialized()))
    dist.destroy_process_group()
    for port in ports:
        with mock.patch.dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)):
            hvd.init(process_sets="dynamic")
        hvd.init()
        here = hvd.is_initialized(), hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
        hvd.barrier()
        hvd.shutdown()
        hvd.shutdown()
        found.append((*here, hvd.is_initialized(), dist.is_initialized()))
    return found


def test_shutdown_leaves_what_init_found_and_ends_what_it_made() -> None:
    ports = [free_port(), free_port()]
    for found in run_ranks(left_and_joined_again, 2, ports):
        assert found == [(True, False, True), (True, 2, False, False), (True, 2, False, False)]


def on_hosts(rank: int, ranks: int, hosts: str) -> tuple[int, ...]:
    with mock.patch.object(socket, "gethostname", return_value=hosts[rank]):
        hvd.init()
    return hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()


def test_places_are_found_by_the_hosts_names() -> None:
    assert run_ranks(on_hosts, 4, "abab") == [
        (0, 2, 0, 2, True),
        (0, 2, 1, 2, True),
        (1, 2, 0, 2, True),
        (1, 2, 1, 2, True),
    ]


def test_hosts_with_unlike_numbers_of_ranks_are_not_homogeneous() -> None:
    assert [place[-1] for place in run_ranks(on_hosts, 6, "abbccc")] == [False] * 6
