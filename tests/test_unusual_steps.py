"""Steps as few people write them, but do: phases, own time and numbers are right there too."""

from __future__ import annotations

import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ddpobs import wire
from ddpobs.hooks import ProcessHooks
from tests.test_recorder import Training, own, phases, plain_step


@pytest.fixture
def training() -> Training:
    return Training()


def test_closures_without_a_loader_are_a_step_each(training: Training) -> None:
    for _ in range(4):
        training.tracker.optimizer_began()
        for _ in range(2):  # As LBFGS evaluates its closure.
            training.forward(20)
            training.backward(40, 30)
        training.spend(5)
        training.tracker.optimizer_ended()
        training.spend(1)
    training.tracker.finish()
    steps = training.steps()
    assert [step.micro_steps for step in steps] == [2] * 4
    assert [phases(step)["backward"] for step in steps] == [80] * 4
    assert phases(steps[-1])["optimizer"] == 5


def test_a_model_that_is_trained_in_evaluation_mode_has_steps(training: Training) -> None:
    """Without dropout on purpose, or because `train()` was forgotten."""
    training.tracker.evaluating = lambda: not training.module.training
    for _ in range(4):
        training.forward(20, training=False)
        training.backward(40, 30)
        training.optimizer(5)
    training.tracker.finish()
    first, *others = training.steps()
    assert phases(first)["backward"] == 40
    assert [phases(step) for step in others] == [
        {"forward": 20, "backward": 40, "exposed_comm": 30, "optimizer": 5}
    ] * 3
    assert [step.samples for step in others] == [4] * 3
    assert [bool(step.flags & wire.NO_ORIGIN) for step in others] == [False] * 3


def test_an_evaluation_of_such_a_model_is_part_of_no_step(training: Training) -> None:
    training.tracker.evaluating = lambda: not training.module.training
    for _ in range(2):
        training.forward(20, training=False)
        training.backward(40, 30)
    with torch.no_grad():
        training.forward(700, training=False)
    training.forward(20, training=False)
    training.backward(40, 30)
    training.tracker.finish()
    assert [phases(step)["backward"] for step in training.steps()] == [40] * 3
    assert bool(training.steps()[2].flags & wire.NO_ORIGIN)


def test_a_backward_of_something_else_opens_no_step(training: Training) -> None:
    assert not training.tracker.backward_began()
    assert training.tracker._step is None


def test_a_map_that_travels_under_backward_is_not_exposed(training: Training) -> None:
    for _ in range(2):
        training.fetch(10)
        training.forward(20)
        launched = training.clock.at
        training.backward(40, 30)
        training.tracker.communicated(0, wire.COMM_KINDS.index("unused_map"), launched, launched + 25)
    training.tracker.finish()
    assert [phases(step)["backward"] for step in training.steps()] == [40, 40]
    assert [phases(step)["exposed_comm"] for step in training.steps()] == [30, 30]
    assert own(training.steps()[1])["backward"] == 40
    assert [step.comm_ns for step in training.steps()] == [25 + 30] * 2


def test_a_bucket_that_was_left_out_has_no_span_and_hides_no_waiting(training: Training) -> None:
    for _ in range(2):
        training.fetch(10)
        training.forward(20)
        training.tracker.backward_began()
        record = training.recorder.backward()
        training.spend(40)
        record.ready_ns[0] = record.launched_ns[0] = training.clock.at
        training.spend(30)
        record.done_ns[0] = training.clock.at
        training.recorder.finished(record)
        training.tracker.backward_ended()
    training.tracker.finish()
    assert [phases(step)["exposed_comm"] for step in training.steps()] == [30, 30]
    assert [len(step.spans_done_ns) for step in training.steps()] == [1, 1]


def test_a_pause_loses_its_step_and_no_number(training: Training) -> None:
    for _ in range(2):
        plain_step(training)
    training.fetch(10)
    training.tracker.pause(True)
    assert training.tracker.number == 2
    training.tracker.pop()
    training.tracker.pause(False)
    for _ in range(2):
        plain_step(training)
    training.tracker.finish()
    assert [raw.number for raw in training.raw] == [0, 1, 2, 3]


def test_a_rank_that_shadowed_has_no_clean_start(training: Training) -> None:
    plain_step(training)
    plain_step(training)
    training.recorder.shadowed()
    plain_step(training)
    plain_step(training)
    training.tracker.finish()
    assert [bool(step.flags & wire.NO_ORIGIN) for step in training.steps()] == [True, False, True, False]


def test_own_time_of_many_optimizers_is_whole_across_batches(training: Training) -> None:
    plain_step(training)
    for _ in range(399):
        training.optimizer(5)
    training.fetch(10)  # The first step is closed, and summarised by itself.
    assert phases(training.steps()[0])["optimizer"] == 400 * 5
    training.forward(20)
    training.backward(40, 30)
    training.tracker.finish()
    assert own(training.steps()[1])["optimizer"] == 400 * 5


def test_pickled_tensors_are_no_checkpoint(training: Training) -> None:
    hooks = ProcessHooks(training.tracker, training.event)
    hooks.install()
    try:
        plain_step(training)
        plain_step(training)
        pickle.dumps(torch.zeros(3))
        plain_step(training)
        torch.save({"weight": torch.zeros(3)}, io.BytesIO())
        plain_step(training)
    finally:
        hooks.remove()
    training.tracker.finish()
    assert [bool(step.flags & wire.NO_ORIGIN) for step in training.steps()] == [True, False, False, True]


def test_another_threads_collective_during_a_backward_is_not_training_s(training: Training) -> None:
    training.fetch(10)
    training.forward(20)
    training.tracker.backward_began()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(training.tracker.blocking_began).result() is None
        assert pool.submit(training.tracker.blocking_began, True).result() is not None


def test_an_optimizer_after_one_with_a_closure_belongs_to_its_step(training: Training) -> None:
    for _ in range(3):
        training.tracker.optimizer_began()
        training.forward(20)
        training.backward(40, 30)
        training.tracker.optimizer_ended()
        training.optimizer(7)
    training.tracker.finish()
    assert [phases(step)["optimizer"] for step in training.steps()] == [7, 7, 7]
    assert [step.end_ns - step.start_ns for step in training.steps()] == [20 + 40 + 30 + 7] * 3


def test_a_backward_in_an_evaluation_does_not_make_evaluations_training(training: Training) -> None:
    """An attack on the inputs, say, whose gradients nobody steps on."""
    training.tracker.evaluating = lambda: not training.module.training
    plain_step(training)
    training.fetch(10)
    training.forward(20, training=False)
    training.backward(40, 30)
    plain_step(training)
    plain_step(training)
    training.fetch(700)
    with torch.no_grad():
        training.forward(800, training=False)
    plain_step(training)
    training.tracker.finish()
    assert phases(training.steps()[-1])["data"] == 10
