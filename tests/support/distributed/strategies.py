"""Strategies of communication that several files test, and what holds on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ddpobs.comm import registry

ARGUMENTS = {"topk": "topk:0.1", "powersgd": "powersgd:2"}
STRATEGIES = [ARGUMENTS.get(registered.name, registered.name) for registered in registry.STRATEGIES]
"""Every registered strategy; a strategy that compresses too much by default has an argument."""


def same_everywhere(tensors: list[torch.Tensor]) -> bool:
    flat = torch.cat([tensor.flatten().double() for tensor in tensors])
    first = flat.clone()
    dist.broadcast(first, 0)
    return torch.equal(first, flat)
