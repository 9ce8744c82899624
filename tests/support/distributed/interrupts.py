"""Models whose backward can be interrupted."""

from __future__ import annotations

from typing import Any

import torch


class StopError(Exception):
    """The error of the user's code, which the training loop catches to continue with the next batch."""


def make_interruptible(ddp: Any, layer: int) -> list[bool]:
    """Let a backward raise before the layer's weight gets its gradient, while the returned list is `[True]`."""
    fails = [False]

    def stop(_: torch.Tensor) -> None:
        if fails[0]:
            raise StopError

    ddp.module[layer].weight.register_hook(stop)
    return fails
