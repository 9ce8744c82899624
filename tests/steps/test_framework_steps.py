"""Steps of frameworks: inputs by keyword, a wrong mode on the wrapper, forward in a closure, evaluations."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch

from ddpobs import wire
from ddpobs.recording.journal import Journal
from ddpobs.recording.module_recorder import ModuleRecorder
from tests.support.recorded_steps import FakeClock, Training, own, phases, plain_step

ROWS = torch.zeros(4, 2)


@pytest.fixture
def training() -> Training:
    return Training()


@pytest.mark.parametrize(
    ("inputs", "kwargs"),
    [
        ((ROWS,), {}),
        ((torch.tensor(0.5), ROWS), {}),
        (([ROWS, torch.zeros(7)], 3), {}),
        ((UserDict(input_ids=ROWS),), {}),
        ((), {"return_dict": True, "input_ids": ROWS}),
        (("text",), {"images": {"left": (ROWS,)}}),
    ],
)
def test_samples_are_counted_wherever_the_batch_is(
    training: Training, inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    training.fetch(1)
    training.recorder.forward_began(inputs, kwargs)
    training.backward(10, 5)
    assert [step.samples for step in training.steps()] == [4]


@pytest.mark.parametrize("wrapper", [True, False])
def test_only_the_mode_of_the_wrapped_module_decides_whether_this_is_training(wrapper: bool) -> None:
    """Lightning leaves the wrapper in evaluation mode after its first validation, Transformers in training mode."""
    clock, raw = FakeClock(), list[Any]()
    journal = Journal(clock, raw.append)
    model = torch.nn.Module()
    model.module = torch.nn.Linear(2, 2)
    recorder = ModuleRecorder(0, model, journal, clock=clock, offer=raw.append, readiness_every=2)
    model.train(not wrapper).training = wrapper
    recorder.forward_began((ROWS,))
    journal.entries.catch_up()
    assert (journal.entries._tracker.step is not None) == (not wrapper)


def test_a_forward_in_the_optimizers_closure_is_forward(training: Training) -> None:
    for _ in range(2):
        training.fetch(10)
        training.journal.optimizer_began()
        training.spend(2)
        training.forward(20)
        training.backward(40, 30)
        training.spend(3)
        training.journal.optimizer_ended()
        training.spend(1)
    first, second = training.steps()
    assert phases(first) == {
        "data": 10,
        "forward": 20,
        "backward": 40,
        "exposed_comm": 30,
        "optimizer": 5,
        "other": 1,
    }
    assert own(second) == {"data": 10, "forward": 20, "backward": 40, "optimizer": 5, "other": 1}


def test_a_closure_without_backward_leaves_the_phases_balanced(training: Training) -> None:
    training.fetch(10)
    training.journal.optimizer_began()
    training.forward(20)
    training.journal.optimizer_ended()
    assert wire.PHASES[training.journal.phase] == "other"


@pytest.mark.parametrize("hooks", ["forward", "fetch", "fetch and forward"])
def test_an_evaluation_is_part_of_no_step(training: Training, hooks: str) -> None:
    """Its forward may bypass DDP (Transformers), and it may have no loader."""
    training.journal.evaluation.covers_all = lambda: not training.module.training
    plain_step(training)
    plain_step(training)
    training.module.eval()
    training.spend(0 if "fetch" in hooks else 3)
    for _ in range(2):
        if "fetch" in hooks:
            training.fetch(700)
        if "forward" in hooks:
            training.forward(800, training=False)
            training.journal.waits.comm_ended(0, 0, training.clock.now_ns - 500, training.clock.now_ns)
    if "fetch" in hooks:
        training.fetch(10)
    training.module.train()
    training.forward(20)
    training.backward(40, 30)
    plain_step(training)
    _, earlier, later, last = training.steps()
    assert earlier.end_ns - earlier.start_ns == 10 + 20 + 40 + 30 + 5 + 3 + (0 if "fetch" in hooks else 3)
    assert phases(later) == ({"data": 10} if "fetch" in hooks else {}) | {
        "forward": 20,
        "backward": 40,
        "exposed_comm": 30,
    }
    assert later.comm_ns == 31
    assert [bool(step.flags & wire.NO_ORIGIN) for step in (earlier, later, last)] == [False, True, False]


def test_micro_batches_before_an_evaluation_are_kept(training: Training) -> None:
    training.journal.evaluation.covers_all = lambda: not training.module.training
    plain_step(training)
    training.fetch(10)
    training.forward(20)
    training.backward(40, 0, synchronised=False)
    training.module.eval()
    training.fetch(700)
    plain_step(training)
    step = training.steps()[1]
    assert (step.micro_steps, step.samples) == (2, 8)
    assert phases(step)["backward"] == 80
