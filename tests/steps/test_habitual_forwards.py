"""Forwards without gradients that every step has: they become part of it."""

from __future__ import annotations

import pytest
import torch

from ddpobs import wire
from tests.support.recorded_steps import Training, own, phases, plain_step


@pytest.fixture
def training() -> Training:
    return Training()


ACTING = 9
"""Consecutive steps with a forward of the policy after which it is a habit; the first has no origin anyway."""


def act(training: Training, mode: bool) -> None:
    with torch.no_grad():
        training.forward(50, training=mode)
    training.spend(10)


@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize("replay", [False, True])
def test_a_forward_without_gradients_in_every_step_becomes_part_of_it(
    training: Training, mode: bool, replay: bool
) -> None:
    """A policy acts in every step; the training batches may come from a loader."""
    training.journal.evaluation.covers_all = lambda: not training.module.training
    for _ in range(2 * ACTING):
        act(training, mode)
        training.module.train()
        if replay:
            training.fetch(10)
        training.forward(20)
        training.backward(40, 30)
        training.optimizer(5)
    training.journal.finish()
    steps = training.steps()
    assert len(steps) == 2 * ACTING
    assert [phases(step)["backward"] for step in steps] == [40] * 2 * ACTING
    clean = [not step.flags & wire.NO_ORIGIN for step in steps]
    assert not any(clean[: ACTING - 1])
    assert all(clean[ACTING:])
    own_ns = own(steps[-1])
    assert own_ns["other"] == 60
    assert own_ns["forward"] == 20
    whole = 60 + (10 if replay else 0) + 20 + 40 + 30 + 5
    assert {step.end_ns - step.start_ns for step in steps[ACTING:-1]} == {whole}


def test_a_metric_after_every_step_becomes_part_of_it(training: Training) -> None:
    training.journal.evaluation.covers_all = lambda: not training.module.training
    for _ in range(2 * ACTING):
        plain_step(training)
        act(training, mode=False)
        training.module.train()
    clean = [not step.flags & wire.NO_ORIGIN for step in training.steps()]
    assert clean == [False] * ACTING + [True] * (len(clean) - ACTING)
    assert len(clean) == 2 * ACTING


def test_a_forward_without_gradients_now_and_then_never_becomes_part_of_a_step(training: Training) -> None:
    training.journal.evaluation.covers_all = lambda: not training.module.training
    for _ in range(2 * ACTING):
        act(training, mode=False)
        training.module.train()
        for _ in range(2):
            training.forward(20)
            training.backward(40, 30)
    training.journal.finish()
    steps = training.steps()
    assert [bool(step.flags & wire.NO_ORIGIN) for step in steps] == [True, False] * 2 * ACTING
    assert {step.end_ns - step.start_ns for step in steps} == {20 + 40 + 30}


@pytest.mark.parametrize("mode", [False, True])
def test_a_validation_after_every_step_is_part_of_no_step(training: Training, mode: bool) -> None:
    """Its batches are fetched without gradients, each for two forwards."""
    training.journal.evaluation.covers_all = lambda: not training.module.training
    for _ in range(2 * ACTING):
        plain_step(training)
        training.module.train(mode)
        with torch.no_grad():
            training.fetch(100)
            training.forward(500, training=mode)
            training.forward(500, training=mode)
        training.module.train()
    steps = training.steps()
    assert {step.end_ns - step.start_ns for step in steps} == {10 + 20 + 70 + 5 + 3}
    assert all(step.flags & wire.NO_ORIGIN for step in steps)
