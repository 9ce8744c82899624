"""A training with one setting: `python training.py '{"model": …}'`, one process per rank."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpobs import DistributedDataParallel


class _Wait(torch.autograd.Function):
    """A layer whose backward waits, as for an accelerator: it takes no time of a processor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the input."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Wait, and return the gradient."""
        time.sleep(_WAIT_S)
        return gradient


class _Waiting(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the linear map; its backward waits."""
        return super().forward(_Wait.apply(x))  # type: ignore[no-untyped-call]


def _waiting() -> nn.Module:
    return nn.Sequential(*(_Waiting(400, 400) for _ in range(18)))


def _deep() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU()) for _ in range(40)))


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


_WAIT_S = 0.004
MODELS = {
    "waiting": (_waiting, (8, 400)),
    "deep": (_deep, (256, 256)),
    "transformer": (_transformer, (4, 64, 256)),
}
"""Each model with the shape of its batch: 10 to 13 MB of gradients, about as long to compute as to send at 1 Gbit/s."""


def train(setting: dict[str, Any]) -> None:
    """Train for `steps` steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    build, shape = MODELS[setting["model"]]
    dist.init_process_group("gloo")
    module = DistributedDataParallel(
        build(), bucket_cap_mb=setting["cap"], comm=setting["strategy"], round_robin_groups=setting["groups"]
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-5)
    batch = torch.randn(shape)
    for _ in range(setting["steps"]):
        for micro in range(setting["batches"]):
            with module.no_sync() if micro < setting["batches"] - 1 else nullcontext():
                module(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    train(json.loads(sys.argv[1]))
