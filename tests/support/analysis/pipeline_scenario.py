"""Synthetic runs of a pipeline of two stages by two replicas, with times that can be added up by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
from ddpobs_server.analysis.evidence import Evidence
from ddpobs_server.analysis.steps.joined_steps import join

from ddpobs import wire
from tests.support.analysis.scenario import MS, with_columns
from tests.support.columns import make_steps

MICRO_BATCHES = 4
STAGES = [[0, 1], [2, 3]]


def events(schedule: str = "ScheduleGPipe", held: tuple[str, str] = ("0", "1")) -> list[tuple[int, wire.Event]]:
    """Return each rank's report of its stages."""
    stages = sum(len(own.split(",")) for own in held)
    facts: dict[str, wire.Scalar] = {"schedule": schedule, "stages": stages, "micro_batches": MICRO_BATCHES}
    return [
        (rank, wire.Event(kind="pipeline", at_ns=0, detail={**facts, "held": own, "first_rank": rank % 2}))
        for own, ranks in zip(held, STAGES, strict=True)
        for rank in ranks
    ]


def columns(computing_ms: list[float], steps: int = 40, own_ms: list[float] | None = None) -> tuple[Any, wire.Steps]:
    """Return the steps of four ranks, each with its computation in a schedule's step.

    The step takes as long as GPipe with the slowest replica of each stage; a rank waits for messages in the rest of it.
    """
    slowest = [max(computing_ms[rank] for rank in ranks) for ranks in STAGES]
    schedule_ms = max(slowest) + (sum(slowest) - max(slowest)) / MICRO_BATCHES
    number, rank = np.repeat(np.arange(steps), 4), np.tile(np.arange(4), steps)
    computing = np.tile(computing_ms, steps) * MS
    whole = np.full(len(number), schedule_ms * MS)
    own = np.tile(own_ms or computing_ms, steps) * MS
    return rank, with_columns(
        make_steps(
            step=number,
            collective=number,
            start_ns=(number * (schedule_ms + 2) * MS).astype(np.int64),
            end_ns=((number + 1) * (schedule_ms + 2) * MS).astype(np.int64),
            own_ns=own.astype(np.int64),
            own_backward_ns=own.astype(np.int64),
            flags=wire.SYNCHRONISED,
        ),
        schedule_ns=whole.astype(np.int64),
        computing_ns=computing.astype(np.int64),
        send_wait_ns=np.zeros(len(number), np.int64),
        receive_wait_ns=(whole - computing).astype(np.int64),
    )


def evidence_of(computing_ms: list[float], **facts: Any) -> Evidence:
    """Return the evidence of such a run; its ranks are not all in one process group."""
    rank, steps = columns(computing_ms, **{name: facts.pop(name) for name in ("steps", "own_ms") if name in facts})
    defaults: dict[str, Any] = {
        "events": events(),
        "world_size": 4,
        "separate_groups_reason": "DDP over 2 of 4 ranks",
    }
    return Evidence(rank=rank, steps=steps, joined=join(rank, steps), **defaults | facts)
