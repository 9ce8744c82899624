"""Agreement of the ranks on a run and an attempt, also if some ranks have no DDP module."""

from __future__ import annotations

import json
import time
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ddpobs import DistributedDataParallel, telemetry
from ddpobs.ranks import run_identity
from tests.support.distributed.compare import batch as inputs
from tests.support.distributed.compare import net
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import sending


def train_until_identified(ddp: DistributedDataParallel, rank: int) -> None:
    """Train until the exporter has its identity, the same number of steps on each rank."""
    ends, group = time.monotonic() + 30, ddp.process_group
    while True:
        ddp(inputs(rank, 0)).sum().backward()
        assert telemetry._process is not None
        identified = torch.tensor(telemetry._process._exporter._cutter.identity is not None)
        dist.all_reduce(identified, dist.ReduceOp.MIN, group=group)
        if identified or time.monotonic() > ends:
            return


def without_rank_0(rank: int, _world_size: int) -> tuple[int, int]:
    """Train on rank 1 only, as a learner beside a coordinating rank."""
    alone = dist.new_group([1])
    with sending() as capture:
        if rank == 1:
            with patch.object(run_identity, "PATIENCE_S", 0.5):
                ddp = DistributedDataParallel(net(), process_group=alone, telemetry=capture.config)
                train_until_identified(ddp, rank)
    return len(capture.steps("step")), sum(batch.dropped for batch in capture.batches)


def test_telemetry_of_ranks_without_rank_0_is_sent() -> None:
    (nothing, _), (steps, dropped) = run_ranks(without_rank_0, 2)
    assert nothing == 0
    assert steps > 0
    assert dropped == 0


def after_a_restart(rank: int, _world_size: int) -> str:
    """Train with a store that still holds the identity of an earlier attempt."""
    if rank == 0:
        store = PrefixStore(f"ddpobs/meeting/{telemetry._generation + 1}", dist.distributed_c10d._get_default_store())
        store.set("drawn", json.dumps({"run": "job", "attempt": "dead"}))
        store.add("asks", 3)
        store.set("asks/1", "of-the-dead")
    dist.barrier()
    with sending() as capture, patch.object(run_identity, "PATIENCE_S", 0.5):
        ddp = DistributedDataParallel(net(), telemetry=capture.config)
        train_until_identified(ddp, rank)
    return capture.batches[0].attempt


def test_a_restart_is_a_new_attempt() -> None:
    first, second = run_ranks(after_a_restart, 2)
    assert first == second != "dead"


def with_clocks_apart(rank: int, _world_size: int) -> str:
    """Train on two hosts with clocks an hour apart."""
    now_ns = time.time_ns
    with sending() as capture, patch("time.time_ns", lambda: now_ns() + rank * 3600 * 10**9):
        ddp = DistributedDataParallel(net(), telemetry=capture.config)
        train_until_identified(ddp, rank)
    return capture.batches[0].attempt


def test_ranks_with_different_clocks_share_the_attempt() -> None:
    first, second = run_ranks(with_clocks_apart, 2)
    assert first == second
