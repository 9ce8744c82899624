"""Looks at a training loop in the test's own thread: its places, and gaps that count as the data phase."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from ddpobs import wire
from ddpobs.recording.hooks.input_counts import InputCounts
from ddpobs.recording.looks.code_samples import CodeSamples
from ddpobs.steps.raw_step import DATA, NO_INPUT, OTHER
from tests.support.recorded_steps import Training

MS = 1_000_000


class LookedAt(Training):
    """A loop that looks at itself while it waits for a batch, or in other code after each step."""

    def __init__(self, texts: bool = True) -> None:
        super().__init__()
        self.journal.modules = 1
        self.samples = CodeSamples(self.journal, texts, lambda: self.clock.now_ns)

    def wait(self) -> None:
        self.clock.now_ns += 50 * MS
        self.samples.look()

    def batches(self, steps: int) -> Iterator[int]:
        for number in range(steps):
            self.wait()
            yield number

    def step(self) -> None:
        self.journal.forward_began(0, training=True, size=NO_INPUT)
        self.clock.now_ns += MS
        self.journal.backward_began()
        self.journal.gradients_reduced(0, object())
        self.journal.backward_ended()
        self.journal.optimizer_began()
        self.journal.optimizer_ended()
        self.journal.entries.catch_up()

    def phase_ns(self) -> dict[int, int]:
        self.journal.finish()
        total = {DATA: 0, OTHER: 0}
        for step in self.raw:
            for (phase, begin), (_, end) in pairwise([*step.switches, (OTHER, step.end)]):
                total[phase] = total.get(phase, 0) + end - begin
        return total


def iterate(training: LookedAt, steps: int) -> None:
    for _ in training.batches(steps):
        training.step()


def work_otherwise(training: LookedAt, steps: int) -> None:
    for _ in range(steps):
        training.step()
        training.wait()


def test_time_for_an_own_loader_becomes_data_after_eight_looks() -> None:
    training = LookedAt()
    iterate(training, 40)
    times = training.phase_ns()
    assert 25 * 50 * MS <= times[DATA] <= 32 * 50 * MS
    (place,) = training.samples.places()
    assert (place.phase, place.iterates) == ("data", True)
    assert "test_code_samples.py" in place.place
    assert place.looks == training.samples.count


def test_a_step_begins_at_the_request_for_its_batch() -> None:
    training = LookedAt()
    iterate(training, 40)
    training.phase_ns()
    step = training.raw[-1]
    assert (DATA, step.switches[0][1]) in step.switches
    assert step.end - step.switches[0][1] == 51 * MS


def test_other_code_between_steps_stays_other() -> None:
    training = LookedAt()
    work_otherwise(training, 40)
    assert training.phase_ns()[DATA] == 0
    (place,) = training.samples.places()
    assert (place.phase, place.iterates, place.calls) == ("other", False, "look")


def test_a_look_stands_for_the_time_since_the_one_before() -> None:
    training = LookedAt()
    for _ in range(40):
        training.step()
        training.clock.now_ns += 50 * MS
        training.samples.look()
    for _ in range(10):
        training.step()
        training.clock.now_ns += 1950 * MS
        training.wait()
    training.step()
    training.clock.now_ns += 1
    training.samples.look()
    early, late = sorted(training.samples.places(), key=lambda place: place.looks, reverse=True)
    assert early.looks > 3 * late.looks
    assert early.time_ns == pytest.approx(early.looks * 51 * MS, rel=0.02)
    assert late.time_ns == pytest.approx(late.looks * 2001 * MS, rel=0.02)
    assert 10 < training.samples.effective_count < 14


def test_a_loop_that_stops_to_ask_an_iterator_counts_as_other_again() -> None:
    training = LookedAt()
    iterate(training, 20)
    before = len(training.raw)
    work_otherwise(training, 80)
    training.phase_ns()
    late = [phase for step in training.raw[before + 60 :] for phase, _ in step.switches]
    assert late
    assert DATA not in late


def test_looks_around_an_evaluation_are_in_no_step() -> None:
    training = LookedAt()
    for _ in range(20):
        training.step()
        training.wait()
        training.journal.waits.training_interrupted()
    assert training.samples.count == 0
    assert training.samples.places() == []


@pytest.mark.parametrize("fetches", [False, True])
def test_code_in_evaluation_mode_is_in_a_step_unless_it_asks_a_loader_for_batches(fetches: bool) -> None:
    """A policy acts in evaluation mode, and so does a validation, through no DDP module. The latter has a loader."""
    training, evaluates = LookedAt(), [False]
    training.journal.evaluation.covers_all = lambda: evaluates[0]
    for _ in range(20):
        training.step()
        evaluates[0] = True
        if fetches:
            training.journal.fetch_began(1)
            training.journal.fetch_ended()
        training.wait()
        evaluates[0] = False
    training.step()
    training.samples.look()
    assert training.samples.count == (0 if fetches else 19)
    assert [place.phase for place in training.samples.places()] == ([] if fetches else ["other"])


@pytest.mark.parametrize("loop", [iterate, work_otherwise])
def test_without_texts_only_counts_are_kept(loop: object) -> None:
    training = LookedAt(texts=False)
    assert callable(loop)
    loop(training, 20)
    (place,) = training.samples.places()
    assert (place.place, place.calls) == ("", "")
    assert place.iterates == (loop is iterate)


def test_looks_and_places_are_bounded() -> None:
    training = LookedAt()
    source = "\n".join("    training.step()\n    training.samples.look()" for _ in range(20))
    loop: dict[str, object] = {}
    exec(compile(f"def loop(training):\n  for _ in range(30):\n{source}", "long_loop.py", "exec"), loop)
    assert callable(loop["loop"])
    loop["loop"](training)
    assert training.samples.count == 256
    assert len(training.samples.places()) == 8


def test_counts_of_loaders_fade() -> None:
    class Loader:
        num_workers, prefetch_factor = 2, 2

    counts = InputCounts()
    assert counts.record() is None
    counts.created(Loader(), 5)
    for _ in range(4096):
        counts.fetched(object(), 2_000_000, 1)
    record = counts.record()
    assert isinstance(record, wire.Input)
    assert (record.batches, record.workers, record.ahead) == (2048, 2, 2)
    assert record.awaited_ns == [0, 2048 * 2_000_000]


def test_frequent_looks_end_once_enough_of_them_count() -> None:
    training = LookedAt()
    ends = []
    for _ in range(6):
        ends.append(training.samples.look(3))
        training.step()
    assert ends == [False] * 5 + [True]  # Before the second forward the training loop is not known.
    assert not training.samples.look()
