"""Closed steps in the queue for their batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from ddpobs import TelemetryConfig, wire
from ddpobs.export.batch_encoder import BatchEncoder
from ddpobs.export.identity import Envelope
from ddpobs.steps.account import Account, StartUp
from ddpobs.steps.step_columns import RawSteps
from ddpobs.telemetry.step_flow import StepFlow, has_passed
from tests.support.recorded_steps import Training, plain_step


def nine_steps() -> tuple[Training, StepFlow, list[tuple[Any, int, int]]]:
    """Nine closed steps, and a flow that lists each offer: the object, its records and its weight."""
    training = Training()
    offered: list[tuple[Any, int, int]] = []
    config = TelemetryConfig(batch_spans=40)

    def offer(*record: Any) -> None:
        offered.append((*record, 1)[:3])

    flow = StepFlow(config, training.clock, offer, Account(StartUp(None, 0, 0)))
    for _ in range(9):
        plain_step(training)
    training.steps()
    return training, flow, offered


@pytest.mark.parametrize("read", range(7))
def test_an_error_of_the_device_spoils_no_other_step(read: int) -> None:
    """At any read in a step: the step is offered in stamps, and the encoder later counts it as lost."""
    training, flow, offered = nine_steps()
    whole = RawSteps.from_steps(training.raw[:2] + training.raw[3:4], training.clock)
    for raw in training.raw[:2]:
        flow.add(raw)
    answers = [*range(read)]

    def times(stamps: Sequence[int]) -> Sequence[int]:
        if not answers:
            raise RuntimeError("unspecified launch failure")
        answers.pop()
        return stamps

    training.clock.times = times  # type: ignore[method-assign]
    flow.add(training.raw[2])
    del training.clock.times
    flow.add(training.raw[3])
    flow.offer_steps()
    earlier, broken, later = (steps for steps, *_ in offered)
    assert broken is training.raw[2]
    earlier.extend(later)
    assert [sample.step for sample in earlier.readiness] == [sample.step for sample in whole.readiness]
    earlier.readiness, whole.readiness = [], []
    assert earlier == whole


def test_events_are_sent_after_a_device_failed_and_its_steps_count_as_lost() -> None:
    """Every read of the failed device raises."""
    training, flow, offered = nine_steps()
    lost: list[int] = []
    encoder = BatchEncoder(Mock(), flow.read, Mock(), lost.append)
    failure = RuntimeError("an illegal memory access was encountered")
    training.clock.times = training.clock.is_ready = Mock(side_effect=failure)  # type: ignore[method-assign]
    for raw in training.raw[:2]:
        flow.add(raw)
    failed = wire.Event(kind="failed", at_ns=1, step=2, detail={})
    assert all(has_passed(training.clock, steps) for steps, *_ in offered)
    envelope = Envelope(
        "run", "a" * 16, "b" * 16, 0, 2, seq=1, emitted=9, dropped=0, anchor=wire.Anchor(wall_ns=1, monotonic_ns=1)
    )
    batch = encoder.encode([*(steps for steps, *_ in offered), failed], envelope, set())
    assert batch.events == [failed]
    assert batch.steps is None
    assert lost == [raw.records for raw in training.raw[:2]]


def test_steps_are_offered_together_except_those_that_the_device_has_not_finished() -> None:
    training, flow, offered = nine_steps()
    late = training.raw[6].end
    for raw in training.raw:
        if raw.end == late:
            training.clock.is_ready = lambda stamp: stamp < late  # type: ignore[method-assign]
        flow.add(raw)
    for _ in range(2):
        flow.offer_steps()
    assert [steps.number for steps, *_ in offered] == [[0, 1, 2], [3, 4, 5], 6, 7, 8]
    # A step has two buckets; every other step has its parameters' readiness.
    assert [records for _, records, _ in offered] == [11, 10, 4, 3, 4]
    assert [weight for *_, weight in offered] == [3, 3, 1, 1, 1]
