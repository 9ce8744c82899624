"""Whose batches they are, where not every rank has a DDP module."""

from __future__ import annotations

import json
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ddpobs import DistributedDataParallel, telemetry
from ddpobs.ranks import run_identity
from tests.distributed.compare import batch, net
from tests.distributed.launch import run_ranks
from tests.distributed.sent import sending


def train_until_known(ddp: DistributedDataParallel, rank: int) -> None:
    """As long as it takes to find out whose records these are; as many steps on each rank."""
    ends, group = time.monotonic() + 30, ddp.process_group
    while True:
        ddp(batch(rank, 0)).sum().backward()
        assert telemetry._process is not None
        known = torch.tensor(telemetry._process._exporter._identity is not None)
        dist.all_reduce(known, dist.ReduceOp.MIN, group=group)
        if known or time.monotonic() > ends:
            return


def without_rank_0(rank: int, _world_size: int) -> tuple[int, int]:
    """Rank 1 trains alone, as a learner does beside a rank that coordinates."""
    alone = dist.new_group([1])
    with sending() as sent:
        if rank == 1:
            with patch.object(run_identity, "PATIENCE_S", 0.5):
                ddp = DistributedDataParallel(net(), process_group=alone, telemetry=sent.config)
                train_until_known(ddp, rank)
    return len(sent.steps("step")), sum(one.dropped for one in sent.batches)


def test_telemetry_of_ranks_without_rank_0_is_sent() -> None:
    (nothing, _), (steps, dropped) = run_ranks(without_rank_0, 2)
    assert nothing == 0
    assert steps > 0
    assert dropped == 0


def after_a_restart(rank: int, _world_size: int) -> str:
    """The launcher's store still has what the attempt before drew."""
    if rank == 0:
        left = PrefixStore(f"ddpobs/meeting/{telemetry._generation + 1}", dist.distributed_c10d._get_default_store())
        left.set("drawn", json.dumps({"run": "job", "attempt": "dead"}))
        left.add("asks", 3)
        left.set("asks/1", "of-the-dead")
    dist.barrier()
    with sending() as sent, patch.object(run_identity, "PATIENCE_S", 0.5):
        ddp = DistributedDataParallel(net(), telemetry=sent.config)
        train_until_known(ddp, rank)
    return sent.batches[0].attempt


def test_a_restart_is_an_attempt_of_its_own() -> None:
    first, second = run_ranks(after_a_restart, 2)
    assert first == second != "dead"


def with_clocks_apart(rank: int, _world_size: int) -> str:
    """Two hosts whose clocks are an hour apart."""
    now_ns = time.time_ns
    with sending() as sent, patch("time.time_ns", lambda: now_ns() + rank * 3600 * 10**9):
        ddp = DistributedDataParallel(net(), telemetry=sent.config)
        train_until_known(ddp, rank)
    return sent.batches[0].attempt


def test_no_clock_says_whose_records_they_are() -> None:
    first, second = run_ranks(with_clocks_apart, 2)
    assert first == second


@pytest.mark.parametrize(
    ("told", "run"),
    [("job-7", "job-7"), ("a b/c", "a-b-c"), ("x" * 200, "x" * 128), ("none", None), ("", None), (None, None)],
)
def test_the_launchers_run_id_is_the_runs_where_it_is_a_real_one(
    told: str | None, run: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if told is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", told)
    assert telemetry._launcher_run() == run
