"""Sparse gradients in Horovod's optimizer: steps that leave them out, compared with steps by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ddpobs.horovod as hvd
from tests.support.distributed.compare import batch, grad
from tests.support.distributed.launch import run_ranks

USES = [(0, 1), (), (0,), (0, 1)]
"""By step, the ranks that use the table; the layer after it is always used."""


class Rows(nn.Module):
    """A table and a layer."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = nn.Embedding(10, 8, sparse=sparse), nn.Linear(8, 2)

    def loss(self, rank: int, step: int) -> torch.Tensor:
        looked_up = self.table(torch.tensor([rank, 5, 6 + step])) if rank in USES[step] else batch(rank, step)
        return self.layer(looked_up).pow(2).mean()  # type: ignore[no-any-return]


BEFORE_BACKWARD: dict[str, Callable[[Any], None]] = {
    "cleared": lambda optimizer: optimizer.zero_grad(),
    "zeroed": lambda optimizer: optimizer.zero_grad(set_to_none=False),
    "kept": lambda optimizer: None,
}


def by_hand(prepare: Callable[[Any], None], ranks: int) -> list[torch.Tensor]:
    """Train all ranks' models on one rank, dense: each `.grad` becomes the mean over the ranks."""
    models = [Rows(sparse=False) for _ in range(ranks)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    for step in range(len(USES)):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            prepare(optimizer)
            model.loss(rank, step).backward()
        for alike in zip(*(model.parameters() for model in models), strict=True):
            rank_gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in alike]
            mean = torch.stack(rank_gradients).mean(0)
            for parameter in alike:
                parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach() for parameter in models[0].parameters()]


def trained(prepare: Callable[[Any], None], rank: int, twice: bool, **options: Any) -> tuple[Rows, set[bool]]:
    """The model, and whether the table's gradients were sparse."""
    model = Rows(sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), **options)
    were_sparse = set()
    for step in range(len(USES)):
        prepare(optimizer)
        model.loss(rank, step).backward()
        if twice:
            optimizer.synchronize()
        optimizer.step()
        were_sparse.add(grad(model.table.weight).is_sparse)
    return model, were_sparse


def left_out(rank: int, ranks: int) -> dict[str, Any]:
    hvd.init()
    warnings.simplefilter("ignore")  # Of `step` after `synchronize`.
    results = {}
    for name, prepare in BEFORE_BACKWARD.items():
        expected = by_hand(prepare, ranks)
        for as_dense in (False, True):
            for twice in (False, True):
                model, were_sparse = trained(prepare, rank, twice, sparse_as_dense=as_dense)
                equal = all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True))
                results[f"{name}, as_dense={as_dense}, twice={twice}"] = equal, were_sparse == {True}
    return results


def test_steps_without_a_sparse_gradient_equal_those_by_hand() -> None:
    for results in run_ranks(left_out, 2):
        assert results == dict.fromkeys(results, (True, True))


def changing(rank: int, ranks: int) -> list[bool]:
    hvd.init()
    table = nn.Embedding(10, 3)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters()), backward_passes_per_step=2)
    were_sparse = []
    for table.sparse in (True, False, True):
        optimizer.zero_grad()
        for _ in range(2):
            table(torch.tensor([rank, 5])).sum().backward()
        optimizer.step()
        were_sparse.append(grad(table.weight).is_sparse)
    return were_sparse


def test_a_gradient_has_its_latest_layout_after_the_step() -> None:
    assert run_ranks(changing, 2) == [[True, False, True]] * 2
