"""Losses that train the DDP module inside a hook of an outer backward: steps, samples, spans and the slow rank."""

from __future__ import annotations

import time
from contextlib import nullcontext
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from ddpobs import wire
from tests.distributed.launch import run_ranks
from tests.distributed.sent import Sent, sending
from tests.distributed.test_steps import ddp_factory

ROWS, WIDTH = 16, 8
SLOW_S = 0.16
"""Delay of rank 1 in each step, spread over its nested forwards."""
SLOW_NS = 160_000_000
STEPS, HABIT = 12, 8
"""Without a loader, eight steps pass before forwards without gradients count as part of a step."""
PASSES = (2, 4, 16)


class Encoder(nn.Module):
    """Rank 1 sleeps in each forward with gradients."""

    def __init__(self, slow_s: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH))
        self.slow_s = slow_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.slow_s and torch.is_grad_enabled():
            time.sleep(self.slow_s)
        return self.layers(x)  # type: ignore[no-any-return]


def cached_loss(encoders: Any, columns: Any, rows: int, last_alone: bool = False) -> torch.Tensor:
    """Contrastive loss with cached gradients: a hook of its backward runs a forward and a backward per mini-batch.

    Args:
        encoders: DDP module of each column.
        columns: Two batches.
        rows: Rows of a mini-batch.
        last_alone: Only the last mini-batch of a column synchronises.
    """
    with torch.no_grad():
        outputs = [[encoder(x) for x in column.split(rows)] for encoder, column in zip(encoders, columns, strict=True)]
    leaves = [[output.detach().requires_grad_() for output in column] for column in outputs]
    first, second = (F.normalize(torch.cat(column)) for column in leaves)
    loss = F.cross_entropy(first @ second.T, torch.arange(len(first)))
    loss.backward()
    carrier = loss.detach().requires_grad_()

    def train(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            for encoder, column, cached in zip(encoders, columns, leaves, strict=True):
                parts = column.split(rows)
                for number, (x, leaf) in enumerate(zip(parts, cached, strict=True), 1):
                    with encoder.no_sync() if last_alone and number < len(parts) else nullcontext():
                        ((encoder(x) * leaf.grad).sum() * gradient).backward()

    carrier.register_hook(train)
    return carrier


def batches(steps: int, with_loader: bool) -> Any:
    generator = torch.Generator().manual_seed(1)
    columns = [torch.randn(steps * ROWS, WIDTH, generator=generator) for _ in range(2)]
    if with_loader:
        return DataLoader(TensorDataset(*columns), batch_size=ROWS)
    return zip(*(column.split(ROWS) for column in columns), strict=True)


def summary(capture: Sent) -> dict[str, Any]:
    spans = list(zip(capture.spans("step"), capture.spans("bucket"), capture.spans("done_ns"), strict=True))
    starts, ends = capture.steps("start_ns"), capture.steps("end_ns")
    return {
        "steps": capture.steps("step"),
        "samples": capture.steps("samples"),
        "backwards": capture.steps("micro_steps"),
        "collectives": capture.steps("collective"),
        "clean": [not flags & wire.NO_ORIGIN for flags in capture.steps("flags")],
        "phases": capture.phases(),
        "own": capture.own(),
        "own_ns": capture.steps("own_ns"),
        "wall": [end - start for start, end in zip(starts, ends, strict=True)],
        "spans": [[bucket for number, bucket, _ in spans if number == step] for step in capture.steps("step")],
        "inside": all(starts[number] <= done <= ends[number] for number, _, done in spans),
        "buckets": len(capture.layouts[-1].buckets),
    }


def cached_trainings(rank: int, world_size: int, kind: str) -> dict[tuple[int, bool], Any]:
    results = {}
    for passes in PASSES:
        for with_loader in (True, False):
            with sending() as capture:
                encoder = Encoder(SLOW_S / passes if rank == 1 else 0.0)
                ddp = ddp_factory(kind, capture)(encoder, bucket_cap_mb=0.001)
                optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
                for columns in batches(STEPS, with_loader):
                    optimizer.zero_grad()
                    cached_loss([ddp, ddp], columns, 2 * ROWS // passes).backward()
                    optimizer.step()
            results[passes, with_loader] = summary(capture)
    return results


@pytest.fixture(scope="module", params=["ours", "attached"])
def trainings(request: pytest.FixtureRequest) -> list[dict[tuple[int, bool], Any]]:
    return run_ranks(cached_trainings, 2, request.param)


CASES = [(passes, with_loader) for passes in PASSES for with_loader in (True, False)]


@pytest.mark.parametrize("case", CASES)
def test_an_optimizer_step_is_a_step_with_every_nested_sample(trainings: Any, case: tuple[int, bool]) -> None:
    for rank in trainings:
        training = rank[case]
        assert training["steps"] == list(range(STEPS))
        assert training["samples"] == [2 * ROWS] * STEPS
        assert training["collectives"] == [case[0] * (step + 1) - 1 for step in range(STEPS)]
        assert training["backwards"][1:] == [case[0] + 2] * (STEPS - 1)
        assert [sum(phases.values()) for phases in training["phases"]] == training["wall"]


@pytest.mark.parametrize("case", CASES)
def test_every_nested_synchronisation_has_its_bucket_spans(trainings: Any, case: tuple[int, bool]) -> None:
    for rank in trainings:
        training = rank[case]
        assert training["inside"]
        assert training["buckets"] > 1
        for buckets in training["spans"][1:]:
            assert sorted(buckets) == sorted(list(range(training["buckets"])) * case[0])


@pytest.mark.parametrize("case", CASES)
def test_the_slow_rank_has_its_delay_in_own_time_and_the_other_rank_has_none(
    trainings: Any, case: tuple[int, bool]
) -> None:
    fast, slow = (rank[case] for rank in trainings)
    since = 1 if case[1] else HABIT + 1
    for training in (fast, slow):
        assert training["clean"] == [False] * since + [True] * (STEPS - since)
    excess_ns = median(a - b for a, b in zip(slow["own_ns"][since:], fast["own_ns"][since:], strict=True))
    assert excess_ns > 0.8 * SLOW_NS
    assert median(own["forward"] for own in slow["own"][since:]) > 0.8 * SLOW_NS
    assert median(phases["exposed_comm"] for phases in fast["phases"][1:]) > 0.8 * SLOW_NS
