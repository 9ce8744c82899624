"""What belongs to one step goes with it, however it ends."""

from __future__ import annotations

from collections.abc import Callable

from ddpobs.steps.backward_record import BackwardRecord
from ddpobs.steps.raw_step import WAITING, RawStep
from ddpobs.steps.step_tracker import StepTracker


def train(tracker: StepTracker) -> None:
    events: tuple[Callable[[], None], ...] = (
        lambda: tracker.forward_began(0, True, 4, 8, 2),
        tracker.backward_began,
        lambda: tracker.gradients_reduced(0, BackwardRecord(0), False),
        tracker.backward_ended,
        tracker.optimizer_began,
        tracker.optimizer_ended,
    )
    for event in events:
        tracker.stamp += 10
        event()


def test_waits_at_a_barrier_in_abandoned_steps_are_no_habit_of_the_steps_that_end() -> None:
    closed: list[RawStep] = []
    tracker = StepTracker(closed.append)
    for _ in range(9):
        tracker.forward_began(0, True, 4, 8, 2)
        tracker.waited_at_barrier(tracker.stamp, tracker.stamp + 1)
        tracker.step_abandoned()
        train(tracker)
    began = tracker.stamp
    tracker.waited_at_barrier(began, began + 100)
    train(tracker)
    train(tracker)
    assert [step.outside for step in closed if step.outside] == [[(WAITING, began, began + 100)]]


def test_counters_of_an_abandoned_backward_are_not_the_next_ones() -> None:
    closed: list[RawStep] = []
    tracker = StepTracker(closed.append)
    tracker.forward_began(0, True, 4, 8, 2)
    tracker.backward_began()
    tracker.counters_read(1, 2)
    tracker.step_abandoned()
    train(tracker)
    train(tracker)
    assert [segment.reading for step in closed for segment in step.segments] == [None]
