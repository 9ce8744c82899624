"""Trainings one after another in one process: each is recorded like a single training."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ddpobs.export import batch_encoder
from tests.support.distributed.compare import batch, net
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.loops import SLOW_S, ddp_factory, summary
from tests.support.distributed.sent import sending


def train(wrap: Any, rank: int) -> None:
    """Run four steps; after the second, a slow forward without gradients with the model left in training mode."""
    ddp = wrap(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(4):
        ddp(batch(rank, step)).sum().backward()
        optimizer.step()
        if step == 1:
            with torch.no_grad():
                ddp(batch(rank, 50))
            time.sleep(SLOW_S)


def in_turn(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    with sending() as capture:
        for _ in range(2):
            train(ddp_factory(kind, capture), rank)
    return summary(capture)


def layouts_in_turn(rank: int, world_size: int, kind: str) -> list[set[int]]:
    """Return the modules in each batch, if every batch repeats all layouts."""
    with patch.object(batch_encoder, "_REPEAT_HELLO", 1), sending() as capture:
        for _ in range(3):
            train(ddp_factory(kind, capture), rank)
    return [{layout.module for layout in wire_batch.layouts} for wire_batch in capture.batches]


@pytest.mark.parametrize("kind", ["ours", "attached"])
def test_layouts_of_collected_models_are_not_repeated(kind: str) -> None:
    for modules in run_ranks(layouts_in_turn, 2, kind):
        assert set.union(*modules) == {0, 1, 2}
        assert not modules[-1] & {0, 1}


@pytest.mark.parametrize("kind", ["ours", "attached"])
def test_a_model_after_a_collected_one_has_the_same_steps(kind: str) -> None:
    for steps in run_ranks(in_turn, 2, kind):
        assert steps["backwards"] == [1] * 8
        assert steps["samples"] == [4] * 8
        assert steps["clean"] == [False, True, False, True] * 2
