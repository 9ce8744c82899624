"""The models of the experiments: all benchmarks', a small one, and ResNet-50 on a device that takes no processor."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from benchmarks.models import MODELS, Model

_FORWARD_S, _BACKWARD_S = 0.1, 0.2
"""Of a whole pass: about what ResNet-50 takes on one core here with four small images."""


class _Wait(torch.autograd.Function):
    """Computation on an accelerator: each direction waits, and the parameter's gradient is zero."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameter: torch.Tensor, share: float) -> torch.Tensor:
        """Wait, and return the input."""
        time.sleep(share * _FORWARD_S)
        ctx.shape, ctx.share = parameter.shape, share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Wait, and return the gradients."""
        time.sleep(ctx.share * _BACKWARD_S)
        return gradient, torch.zeros(ctx.shape), None


class Waiting(nn.Module):
    """A module's parameters, each with an equal share of the computing time: several ranks share a core unslowed."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ParameterList(module.parameters())

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = _Wait.apply(x, layer, 1 / len(self.layers))  # type: ignore[no-untyped-call]
        return x


PAPER_MODELS = MODELS | {
    "waiting": Model(
        "waiting ResNet-50, 25.6 M",
        lambda: Waiting(MODELS["resnet50"].build()),
        lambda: (torch.ones(1, requires_grad=True),),
        lambda result: [result],
    ),
    "uneven": Model(
        "five uneven layers, 1.6 M",
        lambda: nn.Sequential(*(nn.Linear(*sizes) for sizes in pairwise((64, 256, 1024, 1024, 256, 64)))),
        lambda: (torch.randn(8, 64),),
        lambda result: [result],
    ),
}
