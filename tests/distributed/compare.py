"""Runs one training on torch's DDP and on ours, in the same processes, and says how far the results are apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddpobs import DistributedDataParallel
from ddpobs.reducer.settings import Settings

Case = Callable[[Any, int], Any]
"""Takes the DDP class and the rank; gives tensors, or whatever else the user would see."""


def net(wide: int = 200) -> nn.Module:
    """The same on every rank; its buckets are above `buckets.COPY_ON_ARRIVAL_ELEMENTS` or below, as they are capped."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, wide), nn.Tanh(), nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, 2))


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * rank + step))


def train(ddp: Any, rank: int, steps: int = 4, optimizer: Any = None) -> list[torch.Tensor]:
    """A few steps of SGD; parameters and gradients at the end."""
    optimizer = optimizer or torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        ddp(batch(rank, step)).pow(2).mean().backward()
        optimizer.step()
    return outcome(ddp)


def outcome(ddp: Any) -> list[torch.Tensor]:
    """Copies of a module's parameters and of the gradients it has."""
    parameters = list(ddp.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [tensor.detach().clone() for tensor in [*parameters, *gradients]]


def verdicts(cases: Mapping[str, Case], rank: int) -> dict[str, str]:
    """By case: `equal` (bit for bit), `close` (but for the order of sums), `raised` alike, or what differs."""
    found = {}
    with torchs_first_buckets():
        for name, case in cases.items():
            theirs, ours = (result(case, kind, rank) for kind in (TorchDDP, DistributedDataParallel))
            found[name] = verdict(ours, theirs)
            dist.barrier()
    return found


@contextmanager
def torchs_first_buckets() -> Iterator[None]:
    """On more than two ranks have ours begin with torch's buckets, mostly one of all parameters.

    A sum of more than two depends, in its last bits, on where the buckets are cut: that it shows in a result is chance.
    """
    if dist.get_world_size() <= 2:
        yield
        return
    own = DistributedDataParallel._settings

    def as_torchs(ddp: DistributedDataParallel, static_graph: bool) -> Settings:
        limits, _ = ddp._bucket_config.compute_bucket_size_limits(static_graph, ddp.find_unused_parameters)
        return replace(own(ddp, static_graph), first_limits_bytes=limits)

    with mock.patch.object(DistributedDataParallel, "_settings", as_torchs):
        yield


class Raised(str):
    """An error, in words."""


def result(case: Case, kind: Any, rank: int) -> Any:
    dist.barrier()
    try:
        return case(kind, rank)
    except Exception as error:
        return Raised(f"{type(error).__name__}: {str(error)[:60]}")


def verdict(ours: Any, theirs: Any) -> str:
    if isinstance(ours, Raised) and ours == theirs:
        return "raised"
    if same(ours, theirs, torch.equal):
        return "equal"
    return "close" if same(ours, theirs, close) else f"{described(ours)} instead of {described(theirs)}"


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    tolerance = 2e-2 if ours.dtype == torch.bfloat16 else 1e-5
    return torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def same(ours: Any, theirs: Any, equal: Callable[[torch.Tensor, torch.Tensor], bool]) -> bool:
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return equal(ours, theirs)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(same(a, b, equal) for a, b in zip(ours, theirs, strict=True))
    return type(ours) is type(theirs) and bool(ours == theirs)


def described(value: Any) -> str:
    tensors = [item for item in value if isinstance(item, torch.Tensor)] if isinstance(value, list) else []
    if tensors:
        return f"{len(tensors)} tensors of sum {sum(float(tensor.double().sum()) for tensor in tensors)}"
    return str(value)[:300]
