"""Uneven inputs, case by case."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.support.distributed.compare import CAP, batch, net, outcome


def train_unevenly(ddp: Any, rank: int, **options: Any) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with ddp.join(**options):
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            ddp(batch(rank, step)).pow(2).mean().backward()
            optimizer.step()
    return [p.detach().clone() for p in ddp.parameters()]


def plain(kind: Any, rank: int) -> Any:
    return train_unevenly(kind(net(), **CAP), rank)


def finding_unused(kind: Any, rank: int) -> Any:
    return train_unevenly(kind(net(), find_unused_parameters=True, **CAP), rank)


def divided_by_active_ranks(kind: Any, rank: int) -> Any:
    return train_unevenly(kind(net(), **CAP), rank, divide_by_initial_world_size=False)


def with_buffers(kind: Any, rank: int) -> Any:
    torch.manual_seed(1)
    ddp = kind(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), **CAP)
    return [*train_unevenly(ddp, rank), *(buffer.clone() for buffer in ddp.buffers())]


def with_fp16(kind: Any, rank: int) -> Any:
    ddp = kind(net(), **CAP)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train_unevenly(ddp, rank)


def terminated_early(kind: Any, rank: int) -> Any:
    ddp = kind(net(), **CAP)
    try:
        train_unevenly(ddp, rank, throw_on_early_termination=True)
    except RuntimeError as error:
        return [str(error)[:30], *outcome(ddp)]
    return "no error"


def accumulating(kind: Any, rank: int) -> Any:
    ddp = kind(net(), **CAP)
    with ddp.join():
        for step in range(2 + rank):
            ddp.zero_grad()
            with ddp.no_sync():
                ddp(batch(rank, step)).sum().backward()
            ddp(batch(rank, step + 9)).sum().backward()
    return [p.detach().clone() for p in ddp.parameters()]


def disabled(kind: Any, rank: int) -> Any:
    ddp = kind(net(), **CAP)
    with ddp.join(enable=False):
        ddp(batch(rank)).sum().backward()
    return outcome(ddp)


CASES = {
    function.__name__: function
    for function in (
        plain,
        finding_unused,
        divided_by_active_ranks,
        with_buffers,
        with_fp16,
        terminated_early,
        accumulating,
        disabled,
    )
}
