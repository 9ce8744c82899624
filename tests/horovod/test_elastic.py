"""Horovod's elastic state: committed, restored, synchronized, and kept over failures and restarts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ddpobs.horovod as hvd
from benchmarks.rig import patience
from ddpobs.errors import HorovodError, HostsUpdatedInterrupt
from ddpobs.horovod.process import reset
from tests.support.distributed.compare import net
from tests.support.distributed.horovod import loss, raised
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import sending

BATCHES = 6
Results = dict[str, Any]


def kept(rank: int) -> Results:
    """Synchronize, restore and commit a model, its optimizer, a scheduler and objects."""
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.constant_(model.weight, 1.0 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 + rank, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state: Any = hvd.elastic.TorchState(model, optimizer, batch=20 + rank, epoch=10 + rank, scheduler=scheduler)
    seen = []

    def look() -> None:
        momentum = [float(values["momentum_buffer"].sum()) for values in optimizer.state.values()]
        facts = optimizer.param_groups[0]["lr"], momentum, scheduler.last_epoch
        seen.append([state.batch, state.epoch, float(model.weight[0, 0]), *facts])

    def train() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        state.batch += 1

    state.sync()
    look()
    train()
    state.restore()
    look()
    train()
    state.commit()
    look()
    train()
    train()
    state.restore()
    train()
    state.restore()
    look()
    state.model = torch.nn.Linear(2, 2)
    return {"kept": seen, "replaced": state.model is not model}


def sampled(rank: int) -> Results:
    """Sample an epoch in part, and go on after a restore."""
    sampler = hvd.elastic.ElasticSampler(range(11), shuffle=True, seed=3)
    state = hvd.elastic.TorchState(sampler=sampler)
    state.sync()
    whole = list(sampler)
    sampler.record_batch(0, 2)
    state.commit()
    sampler.record_batch(1, 2)
    state.restore()
    rest = list(sampler)
    sampler.set_epoch(1)
    return {"whole": whole, "rest": rest, "length": len(sampler), "next": list(sampler)}


def trained(rank: int, failing: int | None, records: Any = None) -> tuple[list[torch.Tensor], Results]:
    """Train with a commit in every batch; in batch `failing`, rank 1's collective fails once."""
    model, started, reset_calls = net(), [], []
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        inner, model.named_parameters(), telemetry=False if records is None else records.config
    )
    state = hvd.elastic.TorchState(model, optimizer, batch=0)
    state.register_reset_callbacks([lambda: reset_calls.append(hvd.size())])

    @hvd.elastic.run
    def train(state: Any, scale: float) -> str:
        started.append(state.batch)
        while state.batch < BATCHES:
            optimizer.zero_grad()
            if rank == 1 and state.batch == failing and not reset_calls:
                raise hvd.HorovodInternalError("the network fails")
            (scale * loss(model, rank, state.batch)).backward()
            optimizer.step()
            state.batch += 1
            state.commit()
        return "done"

    answer = train(state, scale=1.0)
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    return parameters, {"answer": answer, "started": started, "resets": reset_calls}


def interrupted(rank: int) -> Results:
    """Let rank 0 be notified of a host: all ranks leave the function, and keep what they have."""
    state: Any = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, count=0)
    rounds = []

    @hvd.elastic.run
    def count(state: Any) -> None:
        rounds.append(state.count)
        for _ in range(3):
            state.count += 1
            if rank == 0 and state.count == 2:
                state.on_hosts_updated(1.0)
            state.check_host_updates()

    count(state)
    if rank == 0:
        state.on_hosts_updated(0.5)  # Older than the last one.
    state.check_host_updates()
    if rank == 0:
        state.on_hosts_updated(2.0, 1)
    removed = None
    try:
        state.check_host_updates()
    except HostsUpdatedInterrupt as interrupt:
        removed = interrupt.skip_sync
    return {"rounds": rounds, "count": state.count, "removed": removed}


def elastic(rank: int, ranks: int) -> Results:
    last = hvd.ProcessSet([ranks - 1])
    hvd.init(process_sets=[last])
    results = kept(rank) | sampled(rank)
    plain, results["plain"] = trained(rank, None)
    began_s = time.monotonic()
    with sending() as records:
        again, results["again"] = trained(rank, 3, records)
    results["seconds"] = time.monotonic() - began_s
    results["equal"] = all(map(torch.equal, plain, again))
    results["steps"] = len(records.steps("step"))
    results["interrupted"] = interrupted(rank)
    results["in the set"] = not last.included() or float(hvd.allreduce(torch.ones(1), process_set=last))
    os.environ["HOROVOD_ELASTIC_TIMEOUT"] = "0.2"
    results["alone"] = raised(HorovodError, reset) if rank == 0 else ""
    if rank == 0:
        hvd.shutdown()
    return results


@pytest.fixture(scope="module")
def results() -> list[Results]:
    return run_ranks(elastic, 2)


def test_state_is_rank_0s_after_a_sync_and_the_last_commits_after_a_restore(results: list[Results]) -> None:
    for rank in results:
        first, restored, committed, last = rank["kept"]
        assert first == restored == [20, 10, 1.0, 0.5, first[4], 0]
        assert committed == last
        assert committed[0] == 21
        assert committed[2] == pytest.approx(0.5)
        assert committed[3:] == [pytest.approx(0.05), [4.0], 1]
        assert rank["replaced"]


def test_a_sampler_divides_the_samples_that_are_not_processed(results: list[Results]) -> None:
    both = [list(results[rank][part]) for part in ("whole", "rest", "next") for rank in range(2)]
    whole, rest, following = (zip(*both[index : index + 2], strict=True) for index in (0, 2, 4))
    order, left, later = ([sample for pair in pairs for sample in pair] for pairs in (whole, rest, following))
    assert sorted(order[:11]) == list(range(11))
    assert order[11] == order[0]  # Fills up.
    assert left == [*order[4:11], order[4]]
    assert sorted(later[:11]) == list(range(11))
    assert later != order
    assert [rank["length"] for rank in results] == [6, 6]


def test_a_failed_collective_takes_all_ranks_back_to_the_last_commit(results: list[Results]) -> None:
    for rank in results:
        assert rank["plain"] == {"answer": "done", "started": [0], "resets": []}
        assert rank["again"] == {"answer": "done", "started": [0, 3], "resets": [2]}
        assert rank["equal"]
        assert rank["in the set"]
        assert rank["seconds"] < 40  # The process group's timeout is 60 s.


def test_telemetry_goes_on_after_a_failed_collective(results: list[Results]) -> None:
    assert [rank["steps"] >= BATCHES - 2 for rank in results] == [True, True]


def test_other_hosts_end_the_function_on_every_rank_without_a_restore(results: list[Results]) -> None:
    for rank in results:
        assert rank["interrupted"] == {"rounds": [0, 2], "count": 5, "removed": True}


def test_a_rank_that_does_not_return_is_named(results: list[Results]) -> None:
    assert "ranks 1 did not return within 0 s" in results[0]["alone"]


SCRIPT = """
import os, sys
import torch
import ddpobs.horovod as hvd

hvd.init()
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.ones_(model.weight)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
state = hvd.elastic.TorchState(model, optimizer, batch=0)

@hvd.elastic.run
def train(state):
    begin = state.batch
    while state.batch < 4:
        optimizer.zero_grad()
        if state.batch == 2 and hvd.rank() == 1 and begin == 0:
            os._exit(7)
        model(torch.ones(1, 1)).pow(2).sum().backward()
        optimizer.step()
        state.batch += 1
        model.weight.data.add_(1)
        state.commit()
    os.write(1, f"{sys.argv[1:]} {hvd.rank()} {begin} {state.batch} {model.weight.item()}\\n".encode())

train(state)
"""


def test_horovodruns_next_attempt_begins_with_the_last_commit(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-c", "from ddpobs.cli import main; main()", "horovodrun", "-np", "2"]
    done = subprocess.run(
        [*command, "--reset-limit", "1", sys.executable, str(script), "--lr", "-np"],
        env=os.environ
        | {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=patience.HANG_S,
        check=False,
    )
    # Each batch sets the weight to 0, then to 1.
    lines = [f"['--lr', '-np'] {rank} 2 4 1.0" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == lines, done.stderr
    assert list((tmp_path / f"ddpobs-commits-{os.getuid()}").iterdir()) == []
