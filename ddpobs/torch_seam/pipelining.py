"""Torch's pipeline schedules, as far as ddpobs uses them.

Only a script that has imported `torch.distributed.pipelining` can have a schedule. The import takes long, so ddpobs
never does it.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch.distributed as dist

from ddpobs.torch_seam.collectives import ranks_of


class Pipeline(NamedTuple):
    """A schedule on one rank.

    Attributes:
        schedule: Name of its class.
        stages: Number of stages of the whole pipeline.
        held: Indices of the stages on this rank.
        micro_batches: Micro-batches of one step.
        ranks: Ranks of the stages' process group, which send to each other.
    """

    schedule: str
    stages: int
    held: list[int]
    micro_batches: int
    ranks: list[int]


def schedule_classes() -> list[type]:
    """Return the classes whose `step` runs one step of a schedule; empty before the script's import."""
    module = sys.modules.get("torch.distributed.pipelining.schedules")
    names = ("PipelineScheduleSingle", "PipelineScheduleMulti")
    return [getattr(module, name) for name in names if hasattr(module, name)]


def stage_class() -> type | None:
    """Return the class of all stages; None before the script's import."""
    module = sys.modules.get("torch.distributed.pipelining.stage")
    return getattr(module, "_PipelineStageBase", None)


def stages_of(schedule: Any) -> list[Any]:
    """Return the stages of a schedule on this rank."""
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def trains(schedule: Any) -> bool:
    """Whether a step of the schedule runs backward: its `eval` does not."""
    return bool(schedule._has_backward)


def describe(schedule: Any) -> Pipeline:
    """Return the facts of a schedule."""
    stages = stages_of(schedule)
    return Pipeline(
        type(schedule).__name__,
        stages[0].num_stages,
        [stage.stage_index for stage in stages],
        schedule._n_microbatches,
        ranks_of(stages[0].group or dist.distributed_c10d._get_default_group()),
    )
