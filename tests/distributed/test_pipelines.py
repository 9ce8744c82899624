"""Pipelines of torch's schedules with a DDP in each stage: equality, records, and the overlap of the all-reduce."""

from __future__ import annotations

from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddpobs import DistributedDataParallel, attach, wire
from ddpobs.errors import ReducerError
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.pipelines import STAGES, Layer, Pipeline, equal_models, groups, in_one_process, models
from tests.support.distributed.sent import Sent, sending

SCHEDULES = {"ScheduleGPipe": 2, "Schedule1F1B": 2, "ScheduleInterleaved1F1B": 4}
"""Number of stages on two ranks."""
MICRO_BATCHES, STEPS = 4, 3
KINDS = ("ours", "attached")
PAUSE_S = 0.03


def wrap(kind: str, records: Sent, module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    if kind == "ours":
        return DistributedDataParallel(module, process_group=group, telemetry=records.config)
    ddp = TorchDDP(module, process_group=group)
    if kind == "attached":
        attach(ddp, telemetry=records.config)
    return ddp


def trained(rank: int, world_size: int) -> dict[str, Any]:
    """Train with each schedule and each DDP; compare with one process, and with torch's bare DDP bit for bit."""
    results: dict[str, Any] = {}
    on_groups = groups()
    for schedule, stages in SCHEDULES.items():
        expected = in_one_process(equal_models(stages), STEPS)
        bare: list[torch.Tensor] = []
        for kind in ("bare", *KINDS):
            with sending() as records:
                wrapped = partial(wrap, kind, records)
                pipeline = Pipeline(
                    schedule,
                    equal_models(stages),
                    wrapped,
                    MICRO_BATCHES,
                    on_groups,
                    shapes=kind != "ours",
                    dtype=torch.float64,
                )
                for step in range(STEPS):
                    pipeline.step(step)
                parameters = pipeline.parameters()
                dist.barrier()
            bare = bare or parameters
            alone = [p for index in pipeline.held for p in expected[index].parameters()]
            results[f"{schedule} {kind}"] = {
                "as in one process": all(map(partial(torch.allclose, rtol=1e-9), parameters, alone)),
                "as torch": all(map(torch.equal, parameters, bare)),
                **facts(records),
            }
    return results


def facts(records: Sent) -> dict[str, Any]:
    kinds = records.comms("kind")
    return {
        "micro_steps": records.steps("micro_steps"),
        "schedule_ns": records.steps("schedule_ns"),
        "computing_ns": records.steps("computing_ns"),
        "receive_wait_ns": records.steps("receive_wait_ns"),
        "wall_ns": [end - start for start, end in zip(records.steps("start_ns"), records.steps("end_ns"), strict=True)],
        "kinds": {wire.COMM_KINDS[kind] for kind in kinds},
        "modules": sorted({layout.module for layout in records.layouts}),
        "events": [event.detail for batch in records.batches for event in batch.events if event.kind == "pipeline"],
        "phases": [sum(phases.values()) for phases in records.phases()],
    }


@cache
def outcomes() -> list[dict[str, Any]]:
    return run_ranks(trained, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_of_replicas_trains_as_one_process(schedule: str, kind: str) -> None:
    for results in outcomes():
        assert results[f"{schedule} {kind}"]["as in one process"]
        assert results[f"{schedule} {kind}"]["as torch"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_of_a_schedule_is_one_step_with_its_micro_batches(schedule: str, kind: str) -> None:
    for results in outcomes():
        found = results[f"{schedule} {kind}"]
        chunks = SCHEDULES[schedule] // 2
        assert found["micro_steps"] == [chunks * MICRO_BATCHES] * STEPS
        assert found["phases"] == found["wall_ns"]
        times = zip(found["computing_ns"], found["schedule_ns"], found["wall_ns"], strict=True)
        assert all(0 < computing < whole <= wall for computing, whole, wall in times)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_waits_for_messages_are_communication_of_their_own_kinds(schedule: str, kind: str) -> None:
    for results in outcomes():
        found = results[f"{schedule} {kind}"]
        assert found["kinds"] >= {"send", "receive"}
        assert all(wait > 0 for wait in found["receive_wait_ns"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_rank_reports_its_stages_and_a_number_of_its_own_for_each_module(schedule: str, kind: str) -> None:
    for rank, results in enumerate(outcomes()):
        found, stages = results[f"{schedule} {kind}"], SCHEDULES[schedule]
        held = range(rank // 2, stages, 2)
        assert found["events"] == [
            {
                "schedule": schedule,
                "stages": stages,
                "held": ",".join(map(str, held)),
                "micro_batches": MICRO_BATCHES,
                "first_rank": rank % 2,
            }
        ]
        first = next(members[0] for members in STAGES if rank in members)
        assert found["modules"] == [first + 4 * index for index in range(stages // 2)]


def interrupted(rank: int, world_size: int) -> tuple[list[str], bool, str]:
    """Raise an error between the last backward and the wait for its buckets; then use a schedule without backward."""
    on_groups = groups()
    pipeline = Pipeline("ScheduleGPipe", equal_models(2), over_replicas, 4, on_groups, dtype=torch.float64)
    progress = []
    for step in range(3):
        with mock.patch.object(pipeline.schedule, "_update_losses", side_effect=LookupError if step == 1 else None):
            try:
                pipeline.step(step)
                progress.append("trained")
            except LookupError:
                progress.append("raised")
        pipeline.schedule._internal_losses.clear()
    own = torch.cat([parameter.flatten() for parameter in pipeline.parameters()])
    replicas = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(replicas, own, group=on_groups[1])
    zero_bubble = Pipeline(
        "ScheduleInterleavedZeroBubble", equal_models(4), over_replicas, 4, on_groups, dtype=torch.float64
    )
    try:
        zero_bubble.step(0)
    except ReducerError as error:
        return progress, torch.equal(*replicas), str(error)
    return progress, torch.equal(*replicas), ""


def over_replicas(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return DistributedDataParallel(module, process_group=group)


@cache
def interruptions() -> list[tuple[list[str], bool, str]]:
    return run_ranks(interrupted, 4)


def test_after_an_error_in_a_schedule_the_replicas_train_on_together() -> None:
    for progress, equal, _ in interruptions():
        assert (progress, equal) == (["trained", "raised", "trained"], True)


def test_a_schedule_that_reduces_nothing_is_an_error_on_every_rank() -> None:
    messages = [message for _, _, message in interruptions()]
    assert all("ScheduleInterleavedZeroBubble did not reduce the gradients of stage" in text for text in messages)


def overlapped(rank: int, world_size: int) -> dict[str, float]:
    """Share of the first stage's last backward beside which the last stage's all-reduce was in flight, by kind of DDP.

    Rank 3 computes longer, so that rank 2's all-reduce waits for it. All ranks are on one host, so that their monotonic
    clocks are the same.
    """
    shares = {}
    on_groups = groups()
    for kind in KINDS:
        with sending() as records:
            layers = [[Layer(PAUSE_S)], [Layer(PAUSE_S if rank != 3 else 2 * PAUSE_S)]]
            pipeline = Pipeline("ScheduleGPipe", models(layers), partial(wrap, kind, records), 2, on_groups)
            for step in range(STEPS):
                pipeline.step(step)
            dist.barrier()
        last_backward: list[Any] = [None] * world_size
        dist.all_gather_object(last_backward, layers[pipeline.place][0].stamps[-1])
        began_ns, ended_ns = last_backward[0]
        launched_ns, done_ns = (records.spans(name)[-1] for name in ("launched_ns", "done_ns"))
        shares[kind] = max(0, min(done_ns, ended_ns) - max(launched_ns, began_ns)) / (ended_ns - began_ns)
    return shares


def test_the_all_reduce_of_the_last_stage_overlaps_the_first_stages_backward() -> None:
    shares = run_ranks(overlapped, 4)[2]
    assert shares["ours"] > 0.9, shares
    assert shares["attached"] < 0.1, shares
