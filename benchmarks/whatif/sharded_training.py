"""A fully sharded training: `python sharded_training.py '{"units": …}'`, one process per rank."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ddpobs import attach


class _Wait(torch.autograd.Function):
    """Waits in forward and in backward, as for an accelerator: it takes no time of a processor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        """Wait, and return the input."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Wait, and return the gradient."""
        time.sleep(ctx.seconds)
        return gradient, None


class _Waiting(nn.Linear):
    """A linear map that also waits for so many seconds."""

    wait_s: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the linear map."""
        mapped: torch.Tensor = super().forward(x)
        return _Wait.apply(mapped, self.wait_s) if self.wait_s else mapped  # type: ignore[no-untyped-call]


def _sharded(setting: dict[str, Any]) -> nn.Module:
    """A sequence of layers, of which `merged` neighbours are one unit, and a head."""
    layers = [_Waiting(setting["width"], setting["width"]) for _ in range(setting["units"])]
    for layer in layers:
        layer.wait_s = setting["wait_s"]
    head = nn.Linear(setting["width"], setting["head"])
    model = nn.Sequential(*layers, head)
    for first in range(0, len(layers), setting["merged"]):
        fully_shard([*layers[first : first + setting["merged"]]])
    fully_shard(head)
    fully_shard(model)
    return model


def _begin_early(units: Sequence[Any]) -> None:
    """Begin each all-gather before the computation of the unit before it, beside which it moves."""
    for unit, following in pairwise(units):
        unit.register_forward_pre_hook(_gathering(following))
        following.register_full_backward_pre_hook(_gathering(unit))


def _gathering(unit: Any) -> Callable[..., None]:
    def begin(*_: Any) -> None:
        unit.unshard(async_op=True)

    return begin


def train(setting: dict[str, Any]) -> None:
    """Train for `steps` steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = _sharded(setting)
    if setting["early"]:
        _begin_early(list(model.children()))
    attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch = torch.randn(setting["rows"], setting["width"])
    for _ in range(setting["steps"]):
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
