"""Training loops with a rank or an evaluation that takes long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DataLoader, TensorDataset

import ddpobs
from ddpobs import DistributedDataParallel, wire
from tests.support.distributed.delays import durations
from tests.support.distributed.sent import Sent

SLOW_S = 0.3
SLOW_NS = 300_000_000
"""Delay of a slow rank, and duration of an evaluation's batch: far above the delays of a busy machine."""


def loader(rows: int = 16) -> Any:
    return DataLoader(TensorDataset(torch.randn(rows, 8)), batch_size=4)


def summary(capture: Sent) -> dict[str, Any]:
    return {
        **durations(capture),
        "wall": [end - start for start, end in zip(capture.steps("start_ns"), capture.steps("end_ns"), strict=True)],
        "gaps": gaps_ns(capture),
        "backwards": capture.steps("micro_steps"),
        "samples": capture.steps("samples"),
        "collectives": capture.steps("collective"),
        "clean": [not flags & wire.NO_ORIGIN for flags in capture.steps("flags")],
        "user": capture.comms("kind").count(wire.COMM_KINDS.index("user")),
    }


def gaps_ns(capture: Sent) -> list[int]:
    """The time from each step's end to the next one's begin."""
    return [begin - end for end, begin in zip(capture.steps("end_ns"), capture.steps("start_ns")[1:], strict=False)]


def ddp_factory(kind: str, capture: Sent) -> Callable[..., Any]:
    """Return the function that wraps a loop's modules: our DDP, or torch's with `attach`."""

    def wrap(module: nn.Module, **options: Any) -> Any:
        if kind == "ours":
            return DistributedDataParallel(module, telemetry=capture.config, **options)
        ddp = TorchDDP(module, **options)
        ddpobs.attach(ddp, capture.config)
        return ddp

    return wrap
