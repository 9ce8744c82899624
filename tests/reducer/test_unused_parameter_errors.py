"""Errors and warnings about unused parameters: the same on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from ddpobs import DistributedDataParallel
from ddpobs.errors import ReducerError, UnusedParametersError
from tests.support.distributed.compare import batch
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.unused import Branching, Reused


def errors_of_mistakes(rank: int, world_size: int) -> dict[str, str]:
    """Return the error of each mistake on this rank."""
    cap: dict[str, Any] = {"bucket_cap_mb": 0.0005}

    def used_on_rank_0(ddp: Any) -> None:
        for step in range(2):
            ddp(batch(rank, step), rank == 0).sum().backward()

    def hooked() -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        ddp = DistributedDataParallel(Branching(), **cap)
        ddp.register_comm_hook(None, fp16_compress_hook)
        used_on_rank_0(ddp)

    def joined() -> None:
        ddp = DistributedDataParallel(Branching(), **cap)
        with ddp.join():
            for step in range(1 + rank):
                ddp(batch(rank, step), False).sum().backward()

    def sparse_last() -> None:
        torch.manual_seed(4)
        ddp = DistributedDataParallel(nn.ModuleDict({"e": nn.Embedding(9, 4, sparse=True), "l": Branching()}), **cap)
        ddp.module.forward = lambda x, takes: ddp.module["l"](ddp.module["e"](x).repeat(1, 2), takes)
        ddp(torch.tensor([rank, 3]), rank == 0).sum().backward()

    def used_twice() -> None:
        ddp = DistributedDataParallel(Reused(), bucket_cap_mb=0.0001)
        ddp(batch(rank)).sum().backward()

    def changed_graph(first: bool) -> None:
        ddp = DistributedDataParallel(Branching(), static_graph=True, **cap)
        for step in range(2):
            ddp(batch(rank, step), step == 0 if first else step == 1).sum().backward()

    def used_under_no_sync_alone() -> None:
        ddp = DistributedDataParallel(Branching(), static_graph=True, **cap)
        for step in range(2):
            if step and rank == 0:
                with ddp.no_sync():
                    ddp(batch(rank, step), True).sum().backward()
            ddp(batch(rank, step), False).sum().backward()

    def used_again(**options: Any) -> None:
        """On one rank, let the first layer's gradients arrive again after its buckets were complete."""
        module = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

        def forward(x: torch.Tensor, times: int) -> torch.Tensor:
            for _ in range(times):
                x = checkpoint(module[0], x, use_reentrant=True)
            return module[1](x)  # type: ignore[no-any-return]

        module.forward = forward
        ddp = DistributedDataParallel(module, **cap, **options)
        for step in range(2):
            ddp(batch(rank, step).requires_grad_(), 1 + step * rank).sum().backward()

    mistakes = {
        "used again": used_again,
        "static, used again": lambda: used_again(static_graph=True),
        "flag off": lambda: used_on_rank_0(DistributedDataParallel(Branching(), **cap)),
        "comm hook": hooked,
        "join": joined,
        "sparse": sparse_last,
        "used twice": used_twice,
        "static, less": lambda: changed_graph(True),
        "static, more": lambda: changed_graph(False),
        "static, under no_sync alone": used_under_no_sync_alone,
    }
    messages = {}
    for name, mistake in mistakes.items():
        torch.distributed.barrier()
        try:
            mistake()
            messages[name] = "no error"
        except ReducerError as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


@pytest.fixture(scope="module")
def errors_by_rank() -> list[dict[str, str]]:
    return run_ranks(errors_of_mistakes, 2)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("flag off", "sometimes.weight (rank 1)"),
        ("comm hook", "sometimes.weight (rank 1)"),
        ("join", "never.bias (rank "),
        ("sparse", "l.sometimes.weight (rank 1)"),
        ("used twice", "was ready twice in one backward"),
        ("used again", "rank 1: parameter 0."),
        ("static, used again", "rank 1: the graph changed although static_graph=True: 0."),
        ("static, less", "sometimes.weight"),
        ("static, more", "sometimes.bias"),
        ("static, under no_sync alone", "rank 0: the graph changed although static_graph=True: sometimes.bias"),
    ],
)
def test_every_rank_gets_the_same_error_at_that_backward(
    errors_by_rank: list[dict[str, str]], mistake: str, message: str
) -> None:
    first, second = (answers[mistake] for answers in errors_by_rank)
    assert first == second
    assert message in first


def count_warnings(rank: int, world_size: int) -> list[int]:
    """Count the warnings of a model without unused parameters, and of a model with some."""
    counts = []
    for takes in (True, False):
        ddp = DistributedDataParallel(nn.Linear(8, 8) if takes else Branching(), find_unused_parameters=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                inputs = (batch(rank, step),) if takes else (batch(rank, step), True)
                ddp(*inputs).sum().backward()
        counts.append(sum("find_unused_parameters" in str(warning.message) for warning in caught))
    return counts


def test_the_flag_warns_once_if_no_parameter_is_unused() -> None:
    assert run_ranks(count_warnings, 2) == [[1, 0], [1, 0]]


def test_the_errors_are_runtime_errors_like_those_of_torch() -> None:
    assert issubclass(UnusedParametersError, RuntimeError)
    assert TorchDDP in DistributedDataParallel.__mro__
