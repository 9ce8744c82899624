"""Counters and sizes of inputs by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddpobs import wire
from ddpobs.recording.journal import Journal
from ddpobs.steps.counters import NO_USAGE, Reading
from ddpobs.steps.step_columns import RawSteps
from ddpobs.steps.summary import Summariser
from tests.support.recorded_steps import Training, plain_step


class Readings:
    """Stands for the reader: readings that the test gives."""

    def __init__(self) -> None:
        self.following: list[Reading | tuple[()]] = []

    def read(self) -> Reading | tuple[()]:
        return self.following.pop(0)


class CountedTraining(Training):
    def __init__(self) -> None:
        super().__init__()
        self.readings = Readings()
        self.journal = Journal(self.clock, self.raw.append, counters=self.readings)  # type: ignore[arg-type]
        self.recorder._journal = self.journal
        self.journal.modules = 1


def reading(running: int, usage: tuple[int, int] = (0, 0), series: int = 1, **last: Any) -> Reading:
    return series, b"%d %d 1" % (running, 2 * running), *usage, last.get("quota"), last.get("collections", 0), running


def counted(training: CountedTraining, batches: int = 1) -> dict[str, list[int]]:
    training.journal.finish()
    summariser, columns = Summariser(), []
    size = -(-len(training.raw) // batches)
    for begin in range(0, len(training.raw), size):
        raws = RawSteps.from_steps(training.raw[begin : begin + size], training.clock)
        columns.append(summariser.summarise(raws).steps)
    return {name: column.tolist() for name, column in wire.Steps.concat(columns).by_name().items()}


@pytest.mark.parametrize("batches", [1, 2, 4])
def test_a_step_holds_the_increase_since_the_previous_synchronised_backward(batches: int) -> None:
    training = CountedTraining()
    training.readings.following = [
        reading(100),
        reading(150, (3, 1), quota=b"throttled_time 7\n"),
        reading(250, NO_USAGE, quota=b"throttled_time 9\n"),
        reading(260, (9, 5), quota=b"throttled_time 9\n", collections=2),
    ]
    for _ in range(4):
        plain_step(training)
    steps = counted(training, batches)
    assert steps["running_ns"] == [-1, 50, 100, 10]
    assert steps["run_delay_ns"] == [-1, 100, 200, 20]
    assert steps["preemptions"] == [-1, 3, 0, 6]
    assert steps["major_faults"] == [-1, 1, 0, 4]
    assert steps["throttled_ns"] == [-1, 7, 2, 0]
    assert steps["collections"] == [-1, 0, 0, 2]
    assert steps["collecting_ns"] == [-1, 50, 100, 10]


def test_a_missing_reading_and_another_thread_leave_a_gap() -> None:
    training = CountedTraining()
    training.readings.following = [reading(100), (), reading(300), reading(20, series=2), reading(30, series=2)]
    for _ in range(5):
        plain_step(training)
    steps = counted(training)
    assert steps["running_ns"] == [-1, -1, -1, -1, 10]
    assert steps["preemptions"] == [-1, -1, -1, -1, 0]


def test_counters_are_summed_over_the_backwards_of_a_step() -> None:
    training = CountedTraining()
    training.readings.following = [reading(100), reading(110), reading(130)]
    plain_step(training)
    training.fetch(1)
    training.forward(1)
    training.backward(10, 1)
    training.backward(10, 1)
    training.optimizer(1)
    steps = counted(training)
    assert steps["running_ns"][1] == 30


def test_without_a_reader_every_counter_is_unknown() -> None:
    training = Training()
    plain_step(training)
    training.journal.finish()
    steps = Summariser().summarise(RawSteps.from_steps(training.raw, training.clock)).steps
    assert {int(getattr(steps, name)[0]) for name in ("running_ns", "preemptions", "collecting_ns")} == {wire.UNKNOWN}


def test_elements_add_up_over_micro_batches_and_the_longest_dimension_is_the_largest() -> None:
    training = Training()
    for length in (3, 9, 5):
        training.module.train()
        training.recorder.forward_began((torch.zeros(2, length),))
        training.backward(10, 1, synchronised=length == 5)
    training.optimizer(1)
    training.journal.finish()
    steps = Summariser().summarise(RawSteps.from_steps(training.raw, training.clock)).steps
    assert (steps.samples.tolist(), steps.elements.tolist(), steps.longest.tolist()) == ([6], [34], [9])
