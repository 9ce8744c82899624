"""Units over meshes of two dimensions: shards and replicas, and shards beside tensor parallelism."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from ddpobs_server.analysis.findings.replicas_differ import replicas_differ
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ddpobs
from ddpobs import wire
from tests.support.analysis.failures import evidence
from tests.support.analysis.judged import only
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import sending
from tests.support.distributed.sharded import UNITS, sharded, train_sharded

STEPS = 3


def hybrid(rank: int, size: int, shape: tuple[int, int]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    plain = train_sharded(sharded(mesh=mesh), rank, STEPS)
    with sending() as sent:
        model = sharded(mesh=mesh)
        ddpobs.attach(model, sent.config)
        observed = train_sharded(model, rank, STEPS)
    (layout,) = sent.layouts
    done, launched = sent.spans("done_ns"), sent.spans("launched_ns")
    return {
        "same": all(torch.equal(a, b) for a, b in zip(plain, observed, strict=True)),
        "kinds": [layout.buckets[index].kind for index in sent.spans("bucket")],
        "all done": all(done > launched for done, launched in zip(done, launched, strict=True)),
        "bytes": {bucket.kind: bucket.size_bytes for bucket in layout.buckets if bucket.unit == "blocks.0"},
        "comms": sent.comms("kind"),
        "group": next(batch.hello.settings["group_ranks"] for batch in sent.batches if batch.hello),
        "module": layout.module,
    }


@pytest.mark.parametrize(("size", "shape"), [(2, (2, 1)), pytest.param(4, (2, 2), marks=pytest.mark.wide)])
def test_units_with_replicas_have_their_all_reduce(size: int, shape: tuple[int, int]) -> None:
    for rank in run_ranks(hybrid, size, shape):
        assert rank["same"]
        assert (rank["comms"], rank["group"], rank["module"]) == ([], size, 0)
        assert rank["all done"]
        assert rank["kinds"].count("all_reduce") == STEPS * (1 + UNITS)
        assert rank["kinds"].count("reduce_scatter") == (STEPS * (1 + UNITS) if shape[1] > 1 else 0)
        whole = 4 * (32 * 32 + 32)
        assert rank["bytes"]["all_reduce"] == whole // shape[1]
        if shape[1] > 1:
            assert rank["bytes"]["reduce_scatter"] == rank["bytes"]["all_gather"] == whole


class TwoLayers(nn.Module):
    """Two layers that tensor parallelism divides, and the wait of a rank between them."""

    def __init__(self, late_s: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.late_s = nn.Linear(8, 64), nn.Linear(64, 8), late_s

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        values = self.up(inputs)
        time.sleep(self.late_s)
        return self.down(values)  # type: ignore[no-any-return]


def beside_tensor_parallelism(rank: int, size: int) -> tuple[float, dict[str, Any]]:
    """Train on two dimensions; rank 2 is late in its forward. Return the own time in ms, and the settings."""
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    model = TwoLayers(0.05 if rank == 2 else 0.0)
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    with sending() as sent:
        ddpobs.attach(model, sent.config)
        train_sharded(model, rank // 2, 12)
    settings = next(batch.hello.settings for batch in sent.batches if batch.hello)
    return statistics.median(sent.steps("own_ns")[2:]) / 1e6, settings


@pytest.mark.wide
def test_waits_within_tensor_parallelism_are_no_own_time_and_the_groups_are_told() -> None:
    ranks = run_ranks(beside_tensor_parallelism, 4)
    own_ms = [own for own, _ in ranks]
    assert own_ms[2] - own_ms[0] > 40
    assert own_ms[3] - own_ms[1] < 20, own_ms
    assert [(each["group_ranks"], each["group_first"]) for _, each in ranks] == [(2, 0), (2, 1), (2, 0), (2, 1)]


def parted(rank: int, _size: int, shape: tuple[int, int]) -> list[wire.Fingerprint]:
    """Train two steps; between them rank 1 changes its shard of a bias."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))

    def change(step: int) -> None:
        if step and rank == 1:
            with torch.no_grad():
                model.head.bias.to_local().add_(1.0)

    with sending() as sent:
        model = sharded(mesh=mesh)
        ddpobs.attach(model, replace(sent.config, fingerprint_every=1))
        train_sharded(model, rank, 3, change)
    return [sample for each in sent.batches for sample in each.fingerprints]


@pytest.mark.parametrize(("size", "shape"), [(2, (2, 1)), pytest.param(4, (2, 2), marks=pytest.mark.wide)])
def test_a_changed_shard_is_found_among_its_replicas(size: int, shape: tuple[int, int]) -> None:
    samples = list(enumerate(run_ranks(parted, size, shape)))
    assert {len(own) for _, own in samples} == {2}
    groups = {own[0].module for _, own in samples}
    assert len(groups) == shape[1]
    fingerprints = [(rank, sample) for rank, own in samples for sample in own]
    finding = only(replicas_differ(evidence(fingerprints=fingerprints, world_size=size)))
    assert finding.parameters[0] == "head.bias"
    # Of two replicas the hashes do not show which one is wrong: the higher rank is named.
    assert finding.ranks == [1] if size == 2 else [3]


def accumulated(rank: int, _size: int, replicas: bool) -> dict[str, Any]:
    """Train two steps of three micro-batches, of which only the last one reduces; or reduces over the replicas."""
    from tests.support.distributed.compare import batch

    with sending() as sent:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")) if replicas else None
        model = sharded(mesh=mesh)
        ddpobs.attach(model, sent.config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(2):
            for micro in range(3):
                (model.set_requires_all_reduce if replicas else model.set_requires_gradient_sync)(micro == 2)
                model(batch(rank, 3 * step + micro)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    (layout,) = sent.layouts
    kinds = [layout.buckets[index].kind for index in sent.spans("bucket")]
    micro_steps = sent.steps("micro_steps")
    return {"kinds": kinds, "micro": micro_steps, "steps": sent.spans("step"), "comms": sent.comms("kind")}


def test_micro_batches_without_a_reduction_are_passes_of_one_step() -> None:
    for rank in run_ranks(accumulated, 2, False):
        assert rank["micro"] == [3, 3]
        assert rank["comms"] == []
        assert rank["kinds"].count("reduce_scatter") == 2 * (1 + UNITS)
        assert rank["kinds"].count("all_gather") > 2 * UNITS
        assert set(rank["steps"]) == {0, 1}


def test_micro_batches_without_an_all_reduce_over_replicas_are_passes_of_one_step() -> None:
    for rank in run_ranks(accumulated, 2, True):
        assert rank["micro"] == [3, 3]
        assert rank["kinds"] == ["all_reduce"] * 2 * (1 + UNITS)


def evaluated(rank: int, _size: int) -> dict[str, Any]:
    """Evaluate between two trainings; the gathers of the evaluation are no spans of units."""
    from tests.support.distributed.compare import batch

    with sending() as sent:
        model = sharded()
        ddpobs.attach(model, sent.config)
        train_sharded(model, rank, 2)
        model.eval()
        with torch.no_grad():
            for step in range(3):
                model(batch(rank, step))
        model.train()
        train_sharded(model, rank, 2)
    return {"spans": len(sent.spans("step")), "rows": len(sent.layouts[0].buckets), "phases": sent.phases()}


def test_an_evaluation_is_no_step() -> None:
    for rank in run_ranks(evaluated, 2):
        # The root stays gathered after the evaluation.
        assert rank["spans"] == 4 * rank["rows"] - 1
        assert len(rank["phases"]) == 4
        assert all(phases[name] >= 0 for phases in rank["phases"] for name in wire.PHASES)
