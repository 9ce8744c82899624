"""Whose batches they are, where not every rank has a DDP module."""

from __future__ import annotations

import json
import time

import torch.distributed as dist

from ddpobs import DistributedDataParallel, telemetry
from tests.distributed.compare import batch, net
from tests.distributed.launch import run_ranks
from tests.distributed.sent import sending


def without_rank_0(rank: int, _world_size: int) -> tuple[int, int]:
    """Rank 1 trains alone, as a learner does beside a rank that coordinates."""
    alone = dist.new_group([1])
    with sending() as sent:
        if rank == 1:
            ddp = DistributedDataParallel(net(), process_group=alone, telemetry=sent.config)
            assert telemetry._process is not None
            exporter, ends = telemetry._process._exporter, time.monotonic() + 30
            while exporter._identity is None and time.monotonic() < ends:
                ddp(batch(rank, 0)).sum().backward()
    return len(sent.steps("step")), sum(one.dropped for one in sent.batches)


def test_telemetry_of_ranks_without_rank_0_is_sent() -> None:
    (nothing, _), (steps, dropped) = run_ranks(without_rank_0, 2)
    assert nothing == 0
    assert steps > 0
    assert dropped == 0


def after_a_restart(rank: int, _world_size: int) -> str:
    """The launcher's store still has what the attempt before drew."""
    before = {"run": "job", "attempt": "dead", "drawn_ns": time.time_ns() - 3600 * 10**9}
    generation = f"ddpobs/identity/{telemetry._generation + 1}"
    if rank == 0:
        dist.distributed_c10d._get_default_store().set(generation, json.dumps(before))
    dist.barrier()
    with sending() as sent:
        ddp = DistributedDataParallel(net(), telemetry=sent.config)
        for step in range(3):
            ddp(batch(rank, step)).sum().backward()
    return sent.batches[0].attempt


def test_a_restart_is_an_attempt_of_its_own() -> None:
    first, second = run_ranks(after_a_restart, 2)
    assert first == second != "dead"
