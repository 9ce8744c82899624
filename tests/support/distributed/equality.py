"""Trainings beside torch's DDP: how far the gradients are apart."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddpobs import DistributedDataParallel
from tests.support.distributed.models import MODELS, build

STEPS = 20
# Small buckets, so that a model has several; torch begins with one bucket unless it looks for unused parameters.
CAPS: dict[str, Any] = {"bucket_cap_mb": 0.005}


def train(ddp: Any, name: str, rank: int, steps: int, set_to_none: bool) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        ddp(MODELS[name].batch(rank, step)).pow(2).mean().backward()
        optimizer.step()
    return [tensor.detach().clone() for tensor in ddp.state_dict().values()]


def differences(rank: int, world_size: int, name: str, options: dict[str, Any]) -> list[tuple[bool, float]]:
    """Return for each way of zeroing whether all tensors are equal bit for bit, and the largest difference."""
    by_zeroing = []
    for set_to_none in (True, False):
        ours = train(DistributedDataParallel(build(name), **options), name, rank, STEPS, set_to_none)
        theirs = train(TorchDDP(build(name), **options), name, rank, STEPS, set_to_none)
        equal = all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        by_zeroing.append((equal, max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))))
    return by_zeroing


def equal_after_accumulation(rank: int, world_size: int) -> bool:
    """Accumulate three micro-batches, of which only the last synchronises, on torch's DDP and on ours."""
    grads = []
    for kind in (TorchDDP, DistributedDataParallel):
        ddp = kind(build("transformer"), **CAPS)
        for step in range(2):
            ddp.zero_grad()
            with ddp.no_sync():
                for micro in range(2):
                    ddp(MODELS["transformer"].batch(rank, 10 * step + micro)).pow(2).mean().backward()
            ddp(MODELS["transformer"].batch(rank, 10 * step + 2)).pow(2).mean().backward()
        grads.append([p.grad.clone() for p in ddp.parameters() if p.grad is not None])
    return all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def unused_error(rank: int, world_size: int) -> str:
    ddp = DistributedDataParallel(build("branches"), **CAPS)
    batch = MODELS["branches"].batch(rank, 0)
    batch[0, 0] = 1.0 if rank == 0 else -1.0
    try:
        ddp(batch).sum().backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
