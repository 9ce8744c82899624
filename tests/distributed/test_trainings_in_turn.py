"""Trainings one after another in one process: each is told as if it were the only one."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ddpobs.export import batch_encoder
from tests.distributed.compare import batch, net
from tests.distributed.launch import run_ranks
from tests.distributed.sent import sending
from tests.distributed.test_steps import SLOW_S, makes, summary


def train(make: Any, rank: int) -> None:
    """Four steps, and after two of them a look at the model, left in training mode, that takes its time."""
    ddp = make(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(4):
        ddp(batch(rank, step)).sum().backward()
        optimizer.step()
        if step == 1:
            with torch.no_grad():
                ddp(batch(rank, 50))
            time.sleep(SLOW_S)


def in_turn(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    with sending() as sent:
        for _ in range(2):
            train(makes(kind, sent), rank)
    return summary(sent)


def layouts_in_turn(rank: int, world_size: int, kind: str) -> list[set[int]]:
    """Of which modules each batch tells, if it tells of all that there are."""
    with patch.object(batch_encoder, "_REPEAT_HELLO", 1), sending() as sent:
        for _ in range(3):
            train(makes(kind, sent), rank)
    return [{layout.module for layout in told.layouts} for told in sent.batches]


@pytest.mark.parametrize("kind", ["ours", "attached"])
def test_layouts_of_models_that_are_gone_do_not_pile_up(kind: str) -> None:
    for told in run_ranks(layouts_in_turn, 2, kind):
        assert set.union(*told) == {0, 1, 2}
        assert not told[-1] & {0, 1}


@pytest.mark.parametrize("kind", ["ours", "attached"])
def test_a_model_after_another_that_is_gone_has_the_same_steps(kind: str) -> None:
    for seen in run_ranks(in_turn, 2, kind):
        assert seen["backwards"] == [1] * 8
        assert seen["samples"] == [4] * 8
        assert seen["clean"] == [False, True, False, True] * 2
