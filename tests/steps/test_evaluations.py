"""Forwards and fetches without gradients: part of a step, or an evaluation outside of all steps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ddpobs import wire
from tests.support.recorded_steps import Training, phases, plain_step


@pytest.fixture
def training() -> Training:
    return Training()


def test_a_model_that_is_trained_in_evaluation_mode_has_steps(training: Training) -> None:
    """On purpose, to train without dropout, or because the script does not call `train()`."""
    training.journal.evaluation.covers_all = lambda: not training.module.training
    for _ in range(4):
        training.forward(20, training=False)
        training.backward(40, 30)
        training.optimizer(5)
    training.journal.finish()
    first, *later_steps = training.steps()
    assert phases(first)["backward"] == 40
    assert [phases(step) for step in later_steps] == [
        {"forward": 20, "backward": 40, "exposed_comm": 30, "optimizer": 5}
    ] * 3
    assert [step.samples for step in later_steps] == [4] * 3
    assert [bool(step.flags & wire.NO_ORIGIN) for step in later_steps] == [False] * 3


def test_steps_are_recorded_while_the_model_changes_its_mode(training: Training) -> None:
    """Normalisation may be frozen half-way."""
    training.journal.evaluation.covers_all = lambda: not training.module.training
    for mode in (True, False, True):
        for _ in range(4):
            training.forward(20, training=mode)
            training.backward(40, 30)
            training.optimizer(5)
    steps = training.steps()
    assert len(steps) == 12
    assert [phases(step)["backward"] for step in steps] == [40] * 12
    # The first forward in evaluation mode counts as an evaluation until its gradients are reduced.
    assert [index for index, step in enumerate(steps) if phases(step).get("forward") != 20] == [4]


def test_an_evaluation_of_a_model_trained_in_evaluation_mode_is_part_of_no_step(training: Training) -> None:
    training.journal.evaluation.covers_all = lambda: not training.module.training
    for _ in range(2):
        training.forward(20, training=False)
        training.backward(40, 30)
    with torch.no_grad():
        training.forward(700, training=False)
    training.forward(20, training=False)
    training.backward(40, 30)
    training.journal.finish()
    assert [phases(step)["backward"] for step in training.steps()] == [40] * 3
    assert bool(training.steps()[2].flags & wire.NO_ORIGIN)


def validate(training: Training, *, mode: bool) -> None:
    with torch.no_grad():
        for _ in range(2):
            training.module.train(mode)
            training.fetch(100)
            training.forward(500, training=mode)
    training.spend(50)


@pytest.mark.parametrize("mode", [False, True])
def test_a_validation_without_gradients_is_part_of_no_step(training: Training, mode: bool) -> None:
    """Some scripts leave the model in training mode."""
    training.journal.evaluation.covers_all = lambda: not training.module.training
    for _ in range(3):
        plain_step(training)
        plain_step(training)
        validate(training, mode=mode)
    steps = training.steps()
    assert [phases(step)["data"] for step in steps] == [10] * 6
    assert {step.end_ns - step.start_ns for step in steps} == {10 + 20 + 70 + 5 + 3}


@pytest.mark.parametrize("mode", [False, True])
def test_a_validation_between_two_micro_steps_takes_none_of_the_steps_time(training: Training, mode: bool) -> None:
    training.journal.evaluation.covers_all = lambda: not training.module.training
    for _ in range(3):
        for last in (False, False, True):
            training.fetch(10)
            training.forward(20)
            training.backward(40, 30, synchronised=last)
            if not last:
                validate(training, mode=mode)
        training.optimizer(5)
    steps = training.steps()
    assert [step.micro_steps for step in steps] == [3] * 3
    for step in steps:
        assert phases(step) == {"data": 30, "forward": 60, "backward": 120, "exposed_comm": 30, "optimizer": 5}
        assert step.end_ns - step.start_ns == 245


def test_a_backward_in_an_evaluation_does_not_make_evaluations_training(training: Training) -> None:
    """For example, an attack on the inputs: no optimizer uses its gradients."""
    training.journal.evaluation.covers_all = lambda: not training.module.training
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
    training.journal.finish()
    assert phases(training.steps()[-1])["data"] == 10


def test_a_teacher_in_evaluation_mode_is_part_of_the_step(training: Training) -> None:
    teacher = torch.nn.Linear(2, 2).eval()
    teaching = training.add_recorder(1, teacher)
    training.journal.evaluation.covers_all = lambda: not training.module.training
    for _ in range(3):
        training.fetch(10)
        with torch.no_grad():
            teaching.forward_began((torch.zeros(4, 2),))
        training.spend(15)
        training.forward(20)
        training.backward(40, 30)
    training.journal.finish()
    assert [bool(step.flags & wire.NO_ORIGIN) for step in training.steps()] == [True, False, False]
    assert [step.samples for step in training.steps()] == [4] * 3


def test_a_forward_without_gradients_of_a_trained_module_is_not_a_teachers(training: Training) -> None:
    """For example, a single rank samples from its generator: that is not its own time."""
    other = training.add_recorder(1, torch.nn.Linear(2, 2))
    training.journal.evaluation.covers_all = lambda: False
    for _ in range(3):
        plain_step(training)
        other.forward_began((torch.zeros(4, 2),))
    training.module.eval()
    with torch.no_grad():
        training.recorder.forward_began((torch.zeros(4, 2),))
    training.spend(700)
    plain_step(training)
    training.journal.finish()
    assert bool(training.steps()[-1].flags & wire.NO_ORIGIN)


def test_inference_on_another_thread_does_not_move_the_training(training: Training) -> None:
    module = torch.nn.Linear(2, 2)
    inference = training.add_recorder(1, module)

    def infer() -> None:
        with torch.no_grad():
            inference.forward_began((torch.zeros(4, 2),))

    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            training.journal.fetch_began()
            training.spend(10)
            pool.submit(infer).result()
            training.spend(90)
            training.journal.fetch_ended()
            training.forward(20)
            pool.submit(infer).result()
            training.backward(40, 30)
            training.optimizer(5)
            training.spend(7)
            pool.submit(infer).result()
    training.journal.finish()
    steps = [phases(step) for step in training.steps()]
    assert [(step["data"], step["forward"], step["backward"], step["optimizer"]) for step in steps] == [
        (100, 20, 40, 5)
    ] * 3
    assert [bool(step.flags & wire.NO_ORIGIN) for step in training.steps()] == [True, False, False]


@pytest.mark.parametrize("mode", [False, True])
def test_a_forward_without_gradients_between_fetch_and_forward_is_part_of_the_step(
    training: Training, mode: bool
) -> None:
    """The model labels its own batch."""
    training.journal.evaluation.covers_all = lambda: not training.module.training
    for _ in range(3):
        training.fetch(10)
        with torch.no_grad():
            training.forward(15, training=mode)
        training.forward(20)
        training.backward(40, 30)
    validate(training, mode=mode)
    training.fetch(10)
    training.forward(20)
    training.backward(40, 30)
    training.journal.finish()
    steps = training.steps()
    assert [step.end_ns - step.start_ns for step in steps] == [10 + 15 + 20 + 70] * 3 + [10 + 20 + 70]
    assert [phases(step)["data"] for step in steps] == [10] * 4
    assert [bool(step.flags & wire.NO_ORIGIN) for step in steps] == [True, False, False, True]
    assert [step.samples for step in steps] == [4] * 4


def test_a_forward_without_gradients_after_a_fetch_is_an_evaluation_if_another_fetch_follows(
    training: Training,
) -> None:
    training.journal.evaluation.covers_all = lambda: not training.module.training
    plain_step(training)
    for _ in range(2):
        training.fetch(100)
        training.module.eval()
        with torch.no_grad():
            training.forward(500, training=False)
        training.module.train()
    plain_step(training)
    training.journal.finish()
    first, second = training.steps()
    assert {"other": 3} | phases(second) == phases(first)
    assert bool(second.flags & wire.NO_ORIGIN)


def test_a_batch_fetched_without_gradients_and_trained_on_belongs_to_the_step(training: Training) -> None:
    training.journal.evaluation.covers_all = lambda: not training.module.training
    for _ in range(3):
        with torch.no_grad():
            training.fetch(10)
        training.forward(20)
        training.backward(40, 30)
    training.journal.finish()
    assert [phases(step)["data"] for step in training.steps()] == [10] * 3
    assert [bool(step.flags & wire.NO_ORIGIN) for step in training.steps()] == [True, False, False]


def test_a_validation_beside_one_of_an_untrained_copy_is_part_of_no_step(training: Training) -> None:
    """The copy holds averaged weights."""
    average = training.add_recorder(1, torch.nn.Linear(2, 2))
    training.journal.evaluation.covers_all = lambda: False
    for _ in range(3):
        plain_step(training)
        validate(training, mode=True)
        with torch.no_grad():
            average.forward_began((torch.zeros(4, 2),))
    steps = training.steps()
    assert [step.samples for step in steps] == [4] * len(steps)
    assert {step.end_ns - step.start_ns for step in steps} == {10 + 20 + 70 + 5 + 3}


def test_validation_samples_count_for_no_step_of_several_modules(training: Training) -> None:
    other = Training()
    other.journal, other.clock = training.journal, training.clock
    other.recorder = training.add_recorder(1, other.module)
    bucket = wire.Bucket(size_bytes=8, dtype="float32", parameters=[wire.Parameter(name="w", size=2)])
    other.recorder.layout([bucket, bucket], "all_reduce")
    training.journal.evaluation.covers_all = lambda: False
    for _ in range(3):
        training.fetch(10)
        for loop in (training, other):
            loop.forward(20)
            loop.backward(40, 30)
        with torch.no_grad():
            for _ in range(2):
                training.fetch(100)
                training.forward(500)
    training.journal.finish()
    assert [step.samples for step in training.steps()] == [8] * 3


def test_batches_of_two_loaders_fetched_without_gradients_belong_to_the_step(training: Training) -> None:
    """Semi-supervised training fetches one batch with labels and one without."""
    training.journal.evaluation.covers_all = lambda: not training.module.training
    for validated in (False, False, True, False):
        with torch.no_grad():
            training.fetch(10, loader=1)
            training.fetch(15, loader=2)
        training.forward(20)
        training.backward(40, 30)
        if validated:
            validate(training, mode=True)
    training.journal.finish()
    steps = training.steps()
    assert [phases(step)["data"] for step in steps] == [25] * 4
    assert [bool(step.flags & wire.NO_ORIGIN) for step in steps] == [True, False, False, True]
    assert [step.end_ns - step.start_ns for step in steps] == [25 + 20 + 70] * 4


@pytest.mark.parametrize("fetched", [False, True])
def test_a_validation_of_a_copy_before_the_forward_is_part_of_no_step(training: Training, fetched: bool) -> None:
    """No DDP module runs the averaged weights. The batch of the step may have been fetched before."""
    training.journal.evaluation.covers_all = lambda: not training.module.training
    for validates in (False, True, False):
        if fetched:
            training.fetch(10, loader=1)
        if validates:
            with torch.no_grad():
                for _ in range(4):
                    training.fetch(100, loader=2)
                    training.spend(500)
                training.fetch(0, loader=2)
        training.forward(20)
        training.backward(40, 30)
    training.journal.finish()
    steps = training.steps()
    assert [step.end_ns - step.start_ns for step in steps][1] == 20 + 70
    assert [bool(step.flags & wire.NO_ORIGIN) for step in steps] == [True, True, False]


def test_a_loss_after_a_fetch_is_forward(training: Training) -> None:
    """The next batch is fetched while the device computes the forward."""
    for _ in range(3):
        training.forward(20)
        training.fetch(10)
        training.spend(15)
        training.backward(40, 30)
    training.journal.finish()
    assert [phases(step)["forward"] for step in training.steps()] == [20 + 15] * 3
    assert [phases(step)["data"] for step in training.steps()] == [10] * 3


def test_inference_with_gradients_on_another_thread_does_not_move_the_training(training: Training) -> None:
    """Self-play may omit `no_grad`. Only a thread that calls backward takes over the training."""
    with ThreadPoolExecutor(1) as pool:
        for infers in (False, True, True):
            training.fetch(10)
            training.forward(20)
            if infers:
                pool.submit(training.recorder.forward_began, (torch.zeros(4, 2),)).result()
            training.backward(40, 30)
            training.optimizer(5)
        first_steps = [phases(step) for step in training.steps()]
        for _ in range(3):
            pool.submit(plain_step, training).result()
    training.journal.finish()
    whole = {"data": 10, "forward": 20, "backward": 40, "exposed_comm": 30, "optimizer": 5}
    assert first_steps == [whole] * 3
    assert [phases(step)["backward"] for step in training.steps()] == [40] * 6
    assert [phases(step).get("data") for step in training.steps()][-2:] == [10, 10]
