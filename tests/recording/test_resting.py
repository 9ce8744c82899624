"""Rests of telemetry: nothing is recorded in them, numbers go on, and their cost is measured."""

from __future__ import annotations

from threading import Event

import pytest

from ddpobs import wire
from ddpobs.recording import resting
from ddpobs.recording.place.place_file import Slot
from ddpobs.recording.probes.counter_reader import CounterReader
from ddpobs.steps.own_cost import OwnCost
from ddpobs.steps.raw_step import RESTING
from tests.support.recorded_steps import Training

_CYCLE = 64
_MS = 1_000_000


class _Rested(Training):
    """A training whose steps take 1 % longer while telemetry records."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.cost, self.awake = OwnCost(_CYCLE), Event()
        self.journal.resting.measure(self.cost, CounterReader(), self.awake)
        monkeypatch.setattr(resting, "monotonic_ns", lambda: self.clock.now_ns)
        self.rested: list[int] = []

    def step(self, number: int, loader: bool = True) -> None:
        if loader:
            self.fetch(0)
        self.forward(10 * _MS)
        if self.journal.thread.paused:
            self.rested.append(number)
            assert not self.awake.is_set()
            assert self.recorder.backward() is None
            self.spend(10 * _MS)
            self.optimizer(0)
            return
        assert self.awake.is_set()
        self.spend(_MS // 5)
        self.backward(10 * _MS, 0)
        self.optimizer(0)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> _Rested:
    return _Rested(monkeypatch)


@pytest.mark.parametrize("loader", [True, False])
def test_steps_without_telemetry_are_left_out_and_their_numbers_are_not_given_again(
    training: _Rested, loader: bool
) -> None:
    for number in range(4 * _CYCLE):
        training.step(number, loader)
    training.journal.finish()
    assert training.rested == [number for number in range(4 * _CYCLE) if training.cost.rests.rests(number)]
    assert len(training.rested) == 3 * _CYCLE // 32
    recorded = [number for number in range(4 * _CYCLE) if number not in training.rested]
    assert [raw.number for raw in training.raw] == recorded
    assert [raw.segments[0].collective for raw in training.raw] == recorded
    outside = [interval for raw in training.raw for interval in raw.outside]
    assert [kind for kind, *_ in outside] == [RESTING] * 3
    assert [ended - began for _, began, ended in outside] == [40 * _MS] * 3
    after = [step for step in training.steps() if step.collective - 1 in training.rested]
    assert len(after) == 3
    assert all(step.flags & wire.NO_ORIGIN for step in after)


def test_the_place_of_the_process_goes_on_in_a_rest(training: _Rested) -> None:
    first = training.cost.rests.begin(1)
    for number in range(first + 1):
        training.step(number)
    slots = training.journal.place.slots
    closed, synchronised, at_ns = slots[Slot.CLOSED], slots[Slot.SYNCHRONISED], slots[Slot.AT_NS]
    training.step(first + 1)
    assert (slots[Slot.CLOSED], slots[Slot.SYNCHRONISED]) == (closed + 1, synchronised + 1)
    assert slots[Slot.AT_NS] >= at_ns


def test_the_measured_cost_is_what_recording_adds(training: _Rested) -> None:
    for number in range(8 * _CYCLE):
        training.step(number)
    training.journal.finish()
    cost = training.cost.estimate()
    assert cost is not None
    assert cost.pairs == 6
    assert (cost.ratio, cost.low, cost.high) == pytest.approx((1.01, 1.01, 1.01))


def test_a_step_with_an_evaluation_belongs_to_no_arm(training: _Rested) -> None:
    """Its 5 ms are too few to be left out as a stall."""
    cycles, begin = 12, training.cost.rests.begin
    for number in range(cycles * _CYCLE):
        training.step(number)
        if number % 8 == 0 or begin(2) == number:
            training.forward(5 * _MS, training=False)
    training.journal.finish()  # Its last entries still wait.
    cost = training.cost.estimate()
    assert cost is not None
    assert cost.ratio == pytest.approx(1.01)
    assert cost.pairs == sum(cycle != 2 and begin(cycle) % 8 > 0 for cycle in range(1, cycles - 1))


def test_a_captured_graph_ends_a_rest_and_prevents_further_ones(training: _Rested) -> None:
    first = training.cost.rests.begin(1)
    for number in range(first + 1):
        training.step(number)
    training.journal.pause(True)
    training.journal.pause(False)
    for number in range(first + 1, 4 * _CYCLE):
        training.step(number)
    assert training.rested == [first]
    assert training.awake.is_set()


def test_no_rest_begins_while_several_modules_train(training: _Rested) -> None:
    training.add_recorder(1, training.module)
    for number in range(4 * _CYCLE):
        training.step(number)
    assert not training.rested
