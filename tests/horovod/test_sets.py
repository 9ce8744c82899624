"""Horovod's init and shutdown, process sets, and groups of parameters."""

from __future__ import annotations

import os
import socket
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import ddpobs.horovod as hvd
from benchmarks.rig.ports import free_port
from ddpobs.errors import HorovodError
from tests.support.distributed.compare import net
from tests.support.distributed.horovod import alone, how_close, loss, raised, together
from tests.support.distributed.launch import run_ranks

PAIR = [0, 2]


def in_a_set(rank: int, ranks: int) -> dict[str, Any]:
    """Ranks 0 and 2 train together, and rank 1 by itself."""
    pair = hvd.ProcessSet(PAIR)
    twice = raised(HorovodError, lambda: hvd.init(process_sets=[pair, hvd.ProcessSet(2, 0)]))
    fewer = raised(HorovodError, lambda: hvd.init(comm=[0, 1]))
    hvd.init(comm=[0, 1, 2], process_sets=[pair])
    values = torch.tensor([float(rank)])
    model, reference = net(), net()
    optimizer = together(model, rank, 3, process_set=pair)
    peers = PAIR if pair.included() else [rank]
    alone(reference, len(peers), 3, loss_fn=lambda model, index, number: loss(model, peers[index], number))
    results: dict[str, Any] = {"trained": how_close(model, reference), "reduces": optimizer._reducer is not None}
    results["refused"] = twice, fewer, raised(HorovodError, lambda: hvd.ProcessSet("ranks"))  # type: ignore[arg-type]
    results["id"] = pair.process_set_id, hvd.global_process_set.ranks
    results["backends"] = [
        *(hvd.gloo_built(), hvd.gloo_enabled(), hvd.mpi_enabled(), hvd.mpi_threads_supported()),
        (hvd.cuda_built(), hvd.rocm_built()) == (torch.version.cuda is not None, torch.version.hip is not None),
    ]
    results["outside"] = (
        None if pair.included() else raised(HorovodError, lambda: hvd.allreduce(values, process_set=pair))
    )
    if pair.included():
        results["place"] = pair.rank(), pair.size()
        results["average"] = hvd.allreduce(values, process_set=pair).tolist()
        results["gathered"] = hvd.allgather(values, process_set=pair).tolist()
        results["root's"] = hvd.broadcast(values, root_rank=2, process_set=pair).tolist()
        results["to all"] = hvd.alltoall(torch.tensor([0, 1]) + 10 * rank, process_set=pair).tolist()
        results["scattered"] = hvd.reducescatter(torch.tensor([1.0, 2.0]), op=hvd.Sum, process_set=pair).tolist()
        results["object"] = hvd.broadcast_object(rank, root_rank=2, process_set=pair)
        results["objects"] = hvd.allgather_object(rank, process_set=pair)
        hvd.barrier(pair)
    results["everyone"] = hvd.allreduce(values, op=hvd.Sum).tolist()
    return results


def test_a_set_passed_to_init_trains_and_communicates_by_itself() -> None:
    first, outside, second = run_ranks(in_a_set, 3)
    assert first["trained"] == outside["trained"] == second["trained"] == "equal"
    assert (first["reduces"], outside["reduces"], second["reduces"]) == (True, False, True)
    assert first["backends"] == [True, True, False, False, True]
    assert first["everyone"] == outside["everyone"] == second["everyone"] == [3]
    assert "not in the process set" in outside["outside"]
    for results in (first, outside, second):
        assert results["id"] == (1, [0, 1, 2])
        assert all(
            map(str.__contains__, results["refused"], ("exists already", "expected all 3 ranks", "expected ranks"))
        )
    for index, results in enumerate((first, second)):
        assert results["place"] == (index, 2)
        assert results["average"] == [1]
        assert results["gathered"] == [0, 2]
        assert results["root's"] == [2]
        assert results["to all"] == [[0, 20], [1, 21]][index]
        assert results["scattered"] == [[2], [4]][index]
        assert results["object"] == 2
        assert results["objects"] == [0, 2]


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
    return {
        "how": how_close(model, reference),
        "buckets": [bucket.members for bucket in optimizer._reducer.core.buckets],
        "twice": twice,
    }


def test_parameters_of_a_group_share_a_bucket_and_the_others_have_their_own() -> None:
    for results in run_ranks(grouped, 2):
        assert results["how"] == "equal"
        assert sorted(map(sorted, results["buckets"])) == [[0, 5], [1], [2, 3], [4]]
        assert "one group only" in results["twice"]


def left_and_joined_again(rank: int, ranks: int, ports: list[int]) -> list[Any]:
    """Init first with an existing process group, then twice with a group that `init` creates."""
    results: list[Any] = []
    before_init = raised(HorovodError, hvd.size)
    hvd.init()
    hvd.shutdown()
    results.append((before_init == raised(HorovodError, hvd.rank), hvd.is_initialized(), dist.is_initialized()))
    dist.destroy_process_group()
    for port in ports:
        with mock.patch.dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)):
            hvd.init(process_sets="dynamic")
        hvd.init()
        initialised = hvd.is_initialized(), hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
        hvd.barrier()
        hvd.shutdown()
        hvd.shutdown()
        results.append((*initialised, hvd.is_initialized(), dist.is_initialized()))
    return results


def test_shutdown_destroys_only_the_process_group_that_init_created() -> None:
    ports = [free_port(), free_port()]
    for results in run_ranks(left_and_joined_again, 2, ports):
        assert results == [(True, False, True), (True, 2, False, False), (True, 2, False, False)]


def again_at_one_address(rank: int, ranks: int, port: int) -> list[float]:
    """Init again while the other rank has not shut down."""
    dist.destroy_process_group()
    totals = []
    for number in range(4):
        with mock.patch.dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)):
            hvd.init()
        totals.append(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
        time.sleep(0.5 * (rank == number % 2))
        hvd.shutdown()
    return totals


def test_a_fast_rank_may_init_again_before_the_others_have_shut_down() -> None:
    assert run_ranks(again_at_one_address, 2, free_port()) == [[2] * 4] * 2


def on_hosts(rank: int, ranks: int, hosts: str) -> tuple[int, ...]:
    with mock.patch.object(socket, "gethostname", return_value=hosts[rank]):
        hvd.init()
    return hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()


def test_local_and_cross_ranks_follow_the_host_names() -> None:
    assert run_ranks(on_hosts, 4, "abab") == [
        (0, 2, 0, 2, True),
        (0, 2, 1, 2, True),
        (1, 2, 0, 2, True),
        (1, 2, 1, 2, True),
    ]


def test_hosts_with_different_numbers_of_ranks_are_not_homogeneous() -> None:
    assert [index[-1] for index in run_ranks(on_hosts, 6, "abbccc")] == [False] * 6
