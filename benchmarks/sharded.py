"""A training of a model that FSDP2 shards, with a switch for its telemetry."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.models import Model
from benchmarks.variants import Turn, Variant
from ddpobs import attach
from ddpobs.fsdp import attachment as door

UNITS, WIDTH, ROWS = 4, 1581, 32
"""A unit of this width has 2.5 million parameters, 10 MB."""
UNITS_OF_10_MB = Model(
    f"FSDP2, {UNITS} units of 10 MB",
    lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS))),
    lambda: (torch.randn(ROWS, WIDTH),),
    lambda result: [result],
)


def _attached(module: nn.Module, turn: Turn) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in module.children():
        fully_shard(layer)
    fully_shard(module)
    attach(module, turn.telemetry())
    return module


ATTACHED = Variant("FSDP2, our telemetry attached", _attached)


class Switch:
    """Removes and restores what records a sharded model."""

    def __init__(self, _: Any) -> None:
        self.off, self.on = door._patches.remove, door._patches.install
