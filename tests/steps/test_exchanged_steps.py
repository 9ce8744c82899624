"""Steps of trainings that DDP does not synchronise: they end with their optimizer, and join at an exchange."""

from __future__ import annotations

from ddpobs import wire
from ddpobs.recording.replicas.exchange_steps import exchanged, stepped_alone
from tests.support.recorded_steps import Training, own, phases

_USER = wire.COMM_KINDS.index("user")


def exchange(training: Training, ns: int) -> None:
    began = training.clock.now()
    training.spend(ns)
    training.journal.waits.comm_ended(0, _USER, began, training.clock.now())


def local_step(training: Training) -> None:
    training.fetch(10)
    training.forward(20)
    training.backward(40, 0, synchronised=False)
    training.journal.optimizer_began()
    stepped_alone(training.journal)
    training.spend(5)
    training.journal.optimizer_ended()


def test_a_rank_that_averages_every_second_step_has_steps_and_the_own_time_of_both() -> None:
    training = Training()
    for index in range(6):
        local_step(training)
        if index % 2:
            exchange(training, 100)
            exchanged(training.journal, 0)
    steps = training.steps()
    assert [step.collective for step in steps] == [-1, 0, -1, 1, -1, 2]
    assert [step.own_phases_ns is None for step in steps] == [True, True, True, False, True, False]
    assert own(steps[3]) == {"data": 20, "forward": 40, "backward": 80, "optimizer": 10}
    assert phases(steps[3]) == {"data": 10, "forward": 20, "backward": 40, "optimizer": 5, "exposed_comm": 100}


def test_gradients_that_are_reduced_by_hand_before_the_optimizer_synchronise_each_step() -> None:
    training = Training()
    for _ in range(3):
        training.fetch(10)
        training.forward(20)
        exchange(training, 7)  # A loss that is logged is no part of the exchange.
        training.backward(40, 0, synchronised=False)
        exchange(training, 50)
        exchange(training, 50)
        training.journal.optimizer_began()
        exchanged(training.journal, 0)
        training.spend(5)
        training.journal.optimizer_ended()
    steps = training.steps()
    assert [step.collective for step in steps] == [0, 1, 2]
    assert own(steps[2]) == {"data": 10, "forward": 20, "backward": 40, "optimizer": 5}
    assert phases(steps[2])["exposed_comm"] == 107


def test_an_optimizer_that_steps_alone_ends_the_step_and_nothing_joins_it() -> None:
    training = Training()
    for _ in range(3):
        local_step(training)
    assert [(step.collective, step.micro_steps) for step in training.steps()] == [(-1, 1)] * 3
