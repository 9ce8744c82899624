"""Runs one training on torch's DDP and on ours, in the same processes, and compares the results."""

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
"""Takes the DDP class and the rank; returns tensors, or other results that a user sees."""
CAP: dict[str, Any] = {"bucket_cap_mb": 0.05}
"""With this cap `net()` has several buckets."""


def net(wide: int = 200) -> nn.Sequential:
    """Build the same network on every rank. The bucket cap decides whether buckets copy gradients on arrival."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, wide), nn.Tanh(), nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, 2))


def grad(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter's gradient, which must exist."""
    assert parameter.grad is not None
    return parameter.grad


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * rank + step))


def train(ddp: Any, rank: int, steps: int = 4, optimizer: Any = None) -> list[torch.Tensor]:
    """Train a few steps with SGD, and return the parameters and gradients at the end."""
    optimizer = optimizer or torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        ddp(batch(rank, step)).pow(2).mean().backward()
        optimizer.step()
    return outcome(ddp)


def outcome(ddp: Any) -> list[torch.Tensor]:
    """Return copies of a module's parameters and of its gradients."""
    parameters = list(ddp.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [tensor.detach().clone() for tensor in [*parameters, *gradients]]


def verdicts(cases: Mapping[str, Case], rank: int) -> dict[str, str]:
    """Compare the results of each case.

    Returns:
        By case: `equal` (bit for bit), `close` (up to the order of sums), `raised` (same error), or the difference.
    """
    by_case = {}
    with torchs_first_buckets():
        for name, case in cases.items():
            theirs, ours = (result(case, kind, rank) for kind in (TorchDDP, DistributedDataParallel))
            by_case[name] = verdict(ours, theirs)
            dist.barrier()
    return by_case


@contextmanager
def torchs_first_buckets() -> Iterator[None]:
    """On more than two ranks, let our DDP begin with torch's buckets (mostly one bucket of all parameters).

    The last bits of a sum of more than two terms depend on the cut of the buckets. A result shows that only by chance.
    """
    if dist.get_world_size() <= 2:
        yield
        return
    original = DistributedDataParallel._settings

    def as_torchs(ddp: DistributedDataParallel, static_graph: bool) -> Settings:
        limits = ddp._bucket_caps.first_step(
            static_graph=static_graph, find_unused_parameters=ddp.find_unused_parameters
        )
        return replace(original(ddp, static_graph), first_limits_bytes=limits)

    with mock.patch.object(DistributedDataParallel, "_settings", as_torchs):
        yield


class Raised(str):
    """An error as text."""


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
    return "close" if same(ours, theirs, close) else f"{describe(ours)} instead of {describe(theirs)}"


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    tolerance = 2e-2 if ours.dtype == torch.bfloat16 else 1e-5
    return torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def same(ours: Any, theirs: Any, equal: Callable[[torch.Tensor, torch.Tensor], bool]) -> bool:
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return equal(ours, theirs)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(same(a, b, equal) for a, b in zip(ours, theirs, strict=True))
    return type(ours) is type(theirs) and bool(ours == theirs)


def describe(value: Any) -> str:
    tensors = [item for item in value if isinstance(item, torch.Tensor)] if isinstance(value, list) else []
    if tensors:
        return f"{len(tensors)} tensors of sum {sum(float(tensor.double().sum()) for tensor in tensors)}"
    return str(value)[:300]


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ValueError("it fails")


def raising_in_backward(values: torch.Tensor) -> torch.Tensor:
    """Return the same values; their backward raises a ValueError, "it fails"."""
    return _Raises.apply(values)  # type: ignore[no-any-return, no-untyped-call]
