"""Phases, own time and step numbers of passes inside a hook of an outer backward, to the nanosecond."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support.recorded_steps import Step, Training, own, phases, plain_step


@pytest.fixture
def training() -> Training:
    return Training()


def in_backward(hook: Callable[[], None]) -> None:
    """Run `hook` in a backward of autograd's engine that is not reported to the journal."""
    carrier = torch.ones((), requires_grad=True)
    with torch.enable_grad():
        carrier.register_hook(lambda _: hook())
        (carrier * 1).backward()


def nested_pass(training: Training) -> None:
    with torch.enable_grad():
        training.forward(20)
        training.backward(40, 30)


def cached_step(training: Training, passes: int = 2, data: int = 10) -> None:
    """A step of a cached loss: `data` ns in the loader, 6 ns of outer backward before each pass, 5 ns of optimizer."""

    def hook() -> None:
        for _ in range(passes):
            training.spend(6)
            nested_pass(training)

    if data:
        training.fetch(data)
    recorded = training.journal.backward_began()
    in_backward(hook)
    training.spend(4)
    if recorded:
        training.journal.backward_ended()
    training.optimizer(5)


def backward_calls(steps: list[Step]) -> list[int]:
    return [step.micro_steps for step in steps]


def test_each_nested_pass_is_a_segment_and_its_wait_is_not_own_time(training: Training) -> None:
    for _ in range(3):
        cached_step(training)
    first, second, third = training.steps()
    assert own(second) == own(third) == {"data": 10, "forward": 40, "backward": 2 * 46 + 4, "optimizer": 5}
    assert phases(second) == {"data": 10, "forward": 40, "backward": 96, "exposed_comm": 60, "optimizer": 5}
    assert [len(step.spans_done_ns) for step in (first, second, third)] == [4, 4, 4]
    assert [step.collective for step in (first, second, third)] == [1, 3, 5]
    assert [step.samples for step in (first, second, third)] == [8, 8, 8]


def test_without_a_loader_a_step_begins_with_the_outer_backward(training: Training) -> None:
    for _ in range(3):
        cached_step(training, data=0)
        training.spend(7)
    steps = training.steps()
    assert len(steps) == 3
    assert phases(steps[1]) == {"forward": 40, "backward": 96, "exposed_comm": 60, "optimizer": 5, "other": 7}
    assert backward_calls(steps) == [3, 3, 3]


def test_the_first_outer_backward_is_recorded_from_its_first_pass(training: Training) -> None:
    cached_step(training, data=0)
    (step,) = training.steps()
    assert phases(step) == {"forward": 40, "backward": 2 * 40 + 6, "exposed_comm": 60, "optimizer": 5, "other": 4}


def test_a_loss_of_the_step_before_the_outer_backward_is_part_of_the_step(training: Training) -> None:
    plain_step(training)
    for _ in range(2):
        training.spend(100)  # Belongs to the step before.
        training.journal.backward_began()
        training.spend(8)
        training.journal.backward_ended()
        cached_step(training, data=0)
    steps = training.steps()
    assert backward_calls(steps) == [1, 4, 4]
    assert [phases(step)["backward"] for step in steps] == [40, 8 + 96, 8 + 96]
    assert [phases(step).get("other", 0) for step in steps] == [3 + 100, 100, 0]


def test_a_forward_inside_backward_without_a_backward_of_its_own_is_no_pass(training: Training) -> None:
    for _ in range(2):
        training.fetch(10)
        training.forward(20)
        training.journal.backward_began()
        in_backward(lambda: training.forward(7))
        training.journal.backward_ended()
        training.backward(40, 30)
        training.optimizer(5)
    assert [step.samples for step in training.steps()] == [4, 4]
    assert [phases(step)["forward"] for step in training.steps()] == [20, 20]


def test_a_step_after_a_failed_pass_is_recorded(training: Training) -> None:
    plain_step(training)
    training.fetch(10)
    training.journal.backward_began()
    in_backward(lambda: fail(training))
    training.journal.backward_ended(raised=True)
    for _ in range(2):
        cached_step(training)
    assert [step.collective for step in training.steps()] == [0, 2, 4]
    assert own(training.steps()[-1]) == {"data": 10, "forward": 40, "backward": 96, "optimizer": 5}


def fail(training: Training) -> None:
    with torch.enable_grad():
        training.forward(20)
        training.journal.backward_began()
        training.spend(15)
        training.journal.backward_ended(raised=True)
