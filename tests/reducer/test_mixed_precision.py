"""Torch's own mixed precision, on the CPU with stand-ins for a device's streams, as torch's reducer has none there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from ddpobs import DistributedDataParallel
from tests.support.distributed.compare import CAP, batch, grad, net
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.streams import cpu_streams

STEPS = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "flag": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


class Model(nn.Module):
    """Some layers, with a frozen last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.frozen = net(), nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.net(x))  # type: ignore[no-any-return]


def loss(model: nn.Module, rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    outputs: torch.Tensor = model(batch(rank, step).to(dtype))
    return outputs.pow(2).mean()


def train_in_one_process(dtype: torch.dtype, reduce_dtype: torch.dtype, ranks: int) -> nn.Module:
    """Run the same training in one process, with a low-precision copy of the model for each rank's gradients."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        replicas = [copy.deepcopy(model).to(dtype) for _ in range(ranks)]
        for rank, replica in enumerate(replicas):
            loss(replica, rank, step, dtype).backward()
        for parameter, *copies in zip(model.parameters(), *(replica.parameters() for replica in replicas), strict=True):
            if parameter.requires_grad:
                total = sum((grad(replica).to(reduce_dtype) for replica in copies), torch.zeros((), dtype=reduce_dtype))
                parameter.grad = (total / ranks).float()
        optimizer.step()
    return model


def agreement(rank: int, ranks: int, dtypes: tuple[torch.dtype, torch.dtype]) -> dict[str, bool]:
    """Return by options whether the full-precision parameters equal those of one process."""
    reference = train_in_one_process(*dtypes, ranks)
    with cpu_streams():
        return {name: same(train(rank, dtypes, options), reference) for name, options in OPTIONS.items()}


def train(rank: int, dtypes: tuple[torch.dtype, torch.dtype], options: dict[str, Any]) -> nn.Module:
    ddp = DistributedDataParallel(Model(), mixed_precision=_MixedPrecision(*dtypes), **CAP, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(ddp, rank, step, torch.float32).backward()
        optimizer.step()
    return ddp


def same(ddp: nn.Module, reference: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ddp.parameters(), reference.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)])
def test_a_training_in_mixed_precision_equals_that_of_one_process(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    assert run_ranks(agreement, 2, dtypes) == [dict.fromkeys(OPTIONS, True)] * 2
