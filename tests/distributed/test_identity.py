"""Whose batches they are, where not every rank has a DDP module."""

from __future__ import annotations

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
