"""A model that FSDP2 shards: its steps, and the collectives of its units."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import ddpobs
from ddpobs import wire
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import sending
from tests.support.distributed.sharded import UNITS, Blocks, sharded, train_sharded

STEPS = 5


def trained(rank: int, _size: int) -> dict[str, Any]:
    plain = train_sharded(sharded(), rank, STEPS)
    with sending() as sent:
        model = sharded()
        attachment = ddpobs.attach(model, sent.config)
        assert ddpobs.attach(model, sent.config) is attachment
        observed = train_sharded(model, rank, STEPS)
    same = all(torch.equal(a, b) for a, b in zip(plain, observed, strict=True))
    (layout,) = sent.layouts
    spans = {name: sent.spans(name) for name in wire.Spans.names}
    steps = {name: sent.steps(name) for name in wire.Steps.names}
    return {"same": same, "layout": layout, "spans": spans, "steps": steps, "comms": sent.comms("kind")}


def test_steps_and_units_of_a_sharded_model() -> None:
    for rank in run_ranks(trained, 2):
        assert rank["same"]
        assert rank["comms"] == []
        assert rank["steps"]["collective"] == list(range(STEPS))
        rows = [(bucket.unit, bucket.kind) for bucket in rank["layout"].buckets]
        blocks = [f"blocks.{index}" for index in range(UNITS)]
        assert rows[: 1 + UNITS] == [(name, "all_gather") for name in ("(root)", *blocks)]
        assert {name for name, kind in rows if kind == "all_gather_again"} == set(blocks)
        assert {name for name, kind in rows if kind == "reduce_scatter"} == {"(root)", *blocks}
        assert len(rank["spans"]["step"]) == STEPS * len(rows)


def gathered_early(rank: int, _size: int) -> dict[str, int]:
    """Gather block 1 while block 0 is computed, for so long that it is complete before it is used."""

    def begin(*_: Any) -> None:
        model.blocks[1].unshard(async_op=True)
        time.sleep(0.05)

    with sending() as sent:
        model = sharded()
        model.blocks[0].register_forward_pre_hook(begin)
        ddpobs.attach(model, sent.config)
        train_sharded(model, rank, STEPS)
    rows = [(bucket.unit, bucket.kind) for bucket in sent.layouts[0].buckets]
    waited: dict[str, list[int]] = {}
    for row, ns in zip(sent.spans("bucket"), sent.spans("waited_ns"), strict=True):
        if rows[row][1] == "all_gather":
            waited.setdefault(rows[row][0], []).append(ns)
    return {unit: min(ns) for unit, ns in waited.items()} | {"spans": len(sent.spans("step")), "rows": len(rows)}


def resharded_later(rank: int, _size: int) -> dict[str, Any]:
    """Train two steps whose units stay gathered, and two whose units are gathered again in backward, one rank late."""

    def change(step: int) -> None:
        model.set_reshard_after_forward(step >= 2)
        time.sleep(0.05 * rank)

    with sending() as sent:
        model = sharded(reshard_after_forward=False)
        ddpobs.attach(model, sent.config)
        train_sharded(model, rank, 4, change)
    return {"spans": len(sent.spans("step")), "rows": len(sent.layouts[0].buckets), "comms": sent.comms("step")}


def test_all_gathers_without_a_row_are_communication() -> None:
    for rank in run_ranks(resharded_later, 2):
        assert rank["spans"] == 4 * rank["rows"]
        assert sorted(rank["comms"]) == [2] * (1 + UNITS) + [3] * (1 + UNITS)


class Checkpointed(Blocks):
    """Each block within a reentrant checkpoint, whose forward has no gradients."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        values = self.stem(inputs)
        for block in self.blocks:
            values = checkpoint(block, values, use_reentrant=True)
        return self.head(values)  # type: ignore[no-any-return]


def checkpointed(rank: int, _size: int) -> dict[str, Any]:
    with sending() as sent:
        model = sharded(Checkpointed())
        ddpobs.attach(model, sent.config)
        train_sharded(model, rank, STEPS)
    return {"spans": len(sent.spans("step")), "rows": len(sent.layouts[0].buckets), "comms": sent.comms("kind")}


def test_units_within_reentrant_checkpoints_are_gathered_in_a_training() -> None:
    for rank in run_ranks(checkpointed, 2):
        assert rank["spans"] == STEPS * rank["rows"]
        assert rank["comms"] == []


def evaluated_in_part(rank: int, _size: int) -> dict[str, Any]:
    """Use one block without gradients before each step."""

    def evaluate(_: int) -> None:
        with torch.no_grad():
            model.blocks[0](torch.ones(1, 32))

    with sending() as sent:
        model = sharded()
        ddpobs.attach(model, sent.config)
        train_sharded(model, rank, 1)
        train_sharded(model, rank, STEPS, evaluate)
    micro_steps = [count for each in sent.batches if each.steps for count in each.steps.micro_steps.tolist()]
    return {"spans": len(sent.spans("step")), "rows": len(sent.layouts[0].buckets), "micro_steps": micro_steps}


def test_a_unit_that_is_evaluated_alone_is_no_training() -> None:
    for rank in run_ranks(evaluated_in_part, 2):
        assert rank["spans"] == (1 + STEPS) * rank["rows"]
        assert set(rank["micro_steps"]) == {1}


def test_an_all_gather_that_is_begun_early_is_not_waited_for() -> None:
    """This is what `prefetch-missing` advises where collectives block."""
    for rank in run_ranks(gathered_early, 2):
        assert rank["blocks.1"] == 0
        assert rank["blocks.2"] > 0
        assert rank["spans"] == STEPS * rank["rows"]


def test_phases_add_up_and_own_time_excludes_the_waits() -> None:
    for rank in run_ranks(trained, 2):
        steps, spans = rank["steps"], rank["spans"]
        for row in range(STEPS):
            phases = sum(steps[f"{phase}_ns"][row] for phase in wire.PHASES)
            assert phases == steps["end_ns"][row] - steps["start_ns"][row]
            waited = sum(ns for ns, step in zip(spans["waited_ns"], spans["step"], strict=True) if step == row)
            assert 0 < waited <= steps["exposed_comm_ns"][row]
