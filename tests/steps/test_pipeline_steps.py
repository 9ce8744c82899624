"""Steps of a pipeline's schedule, with times that can be added up by hand."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from ddpobs import wire
from ddpobs.steps.step_columns import RawSteps
from ddpobs.steps.summary import Summariser, Summary
from tests.support.recorded_steps import Training


class Message(dist.Work):
    """A work of two ranks."""

    def __init__(self, op_type: int) -> None:
        super().__init__()
        self._op_type = op_type

    def _get_op_type(self) -> int:
        return self._op_type


SEND, RECEIVE = Message(12), Message(13)


class PipelineTraining(Training):
    """The last stage of two: it receives, computes and sends each micro-batch."""

    def wait(self, message: Message, ns: int) -> None:
        began = self.journal.waits.collective_wait_began(False, message)
        self.spend(ns)
        self.journal.waits.collective_wait_ended(began)

    def schedule(self, micro_batches: int = 2) -> None:
        """A step of 7 + 20 + 1 ns in forward and 40 + 3 ns in backward for each micro-batch, and 5 ns of its own."""
        assert self.journal.schedule_began()
        for _ in range(micro_batches):
            self.wait(RECEIVE, 7)
            self.forward(20)
            self.wait(SEND, 1)
        for index in range(micro_batches):
            self.backward(40, 0, synchronised=index == micro_batches - 1)
            self.wait(SEND, 3)
        self.spend(5)
        self.journal.schedule_ended()

    def summary(self) -> Summary:
        self.journal.finish()
        return Summariser().summarise(RawSteps.from_steps(self.raw, self.clock))


@pytest.fixture
def training() -> PipelineTraining:
    return PipelineTraining()


def test_a_schedules_step_has_its_computation_and_its_waits(training: PipelineTraining) -> None:
    for _ in range(3):
        training.schedule()
        training.optimizer(9)
    steps = training.summary().steps
    assert steps.step.tolist() == [0, 1, 2]
    assert steps.micro_steps.tolist() == [2, 2, 2]
    assert steps.schedule_ns.tolist() == [2 * (7 + 20 + 1 + 40 + 3) + 5] * 3
    assert steps.computing_ns.tolist() == [2 * (20 + 40)] * 3
    assert steps.receive_wait_ns.tolist() == [14] * 3
    assert steps.send_wait_ns.tolist() == [8] * 3


def test_the_wait_for_the_first_message_belongs_to_its_own_step(training: PipelineTraining) -> None:
    for _ in range(3):
        training.schedule()
        training.optimizer(9)
        training.spend(2)
    summary = training.summary()
    received = summary.comms.select(summary.comms.kind == wire.COMM_KINDS.index("receive"))
    assert received.step.tolist() == [0, 0, 1, 1, 2, 2]
    first = [int(received.launched_ns[received.step == step][0]) for step in range(3)]
    assert first == summary.steps.start_ns.tolist()


def test_waits_for_messages_are_no_own_time(training: PipelineTraining) -> None:
    for _ in range(3):
        training.schedule()
        training.optimizer(9)
    steps = training.summary().steps
    assert steps.own_ns.tolist()[1:] == [5 + 9 + 2 * (20 + 40)] * 2


def test_a_step_without_a_schedule_has_none(training: PipelineTraining) -> None:
    for _ in range(2):
        training.forward(20)
        training.backward(40, 10)
        training.optimizer(9)
    steps = training.summary().steps
    assert steps.schedule_ns.tolist() == steps.computing_ns.tolist() == [wire.UNKNOWN] * 2
    assert steps.receive_wait_ns.tolist() == [0, 0]


def test_an_evaluation_between_two_schedules_is_outside_of_the_steps(training: PipelineTraining) -> None:
    training.journal.evaluation.covers_all = lambda: not training.module.training
    training.schedule()
    training.optimizer(9)
    training.forward(1000, training=False)
    training.module.train()
    training.schedule()
    training.optimizer(9)
    steps = training.summary().steps
    assert steps.schedule_ns.tolist() == [147, 147]
    assert [int(end - start) for start, end in zip(steps.start_ns, steps.end_ns, strict=True)] == [156, 156]


def test_a_wait_for_a_message_has_a_name_while_it_lasts(training: PipelineTraining) -> None:
    training.schedule()
    began = training.journal.waits.collective_wait_began(False, RECEIVE)
    assert training.journal.waits.name == "receive of a message"
    training.journal.waits.collective_wait_ended(began)
    assert training.journal.waits.name == ""
