"""Closed steps in the queue for their batch."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from ddpobs import TelemetryConfig, wire
from ddpobs.export.batch_encoder import BatchEncoder
from ddpobs.export.identity import Envelope
from ddpobs.steps.step_columns import RawSteps
from ddpobs.telemetry import Telemetry
from tests.support.recorded_steps import Training, plain_step


def nine_steps() -> tuple[Training, Telemetry, list[tuple[Any, int, int]]]:
    """Nine closed steps, and a telemetry object that lists each offer: the object, its records and its weight."""
    training = Training()
    offered: list[tuple[Any, int, int]] = []
    process = Telemetry.__new__(Telemetry)
    process._clock, process._steps, process._config = training.clock, RawSteps(), TelemetryConfig(batch_spans=40)
    process._exporter = SimpleNamespace(offer=lambda *offer: offered.append((*offer, 1)[:3]))  # type: ignore[assignment]
    for _ in range(9):
        plain_step(training)
    training.steps()
    return training, process, offered


@pytest.mark.parametrize("read", range(7))
def test_an_error_of_the_device_spoils_no_other_step(read: int) -> None:
    """At any read in a step: the step is offered in stamps, and the encoder later counts it as lost."""
    training, process, offered = nine_steps()
    whole = RawSteps.from_steps(training.raw[:2] + training.raw[3:4], training.clock)
    for raw in training.raw[:2]:
        process._add_step(raw)
    answers = [*range(read)]

    def times(stamps: Sequence[int]) -> Sequence[int]:
        if not answers:
            raise RuntimeError("unspecified launch failure")
        answers.pop()
        return stamps

    training.clock.times = times  # type: ignore[method-assign]
    process._add_step(training.raw[2])
    del training.clock.times
    process._add_step(training.raw[3])
    process._offer_steps()
    earlier, broken, later = (steps for steps, *_ in offered)
    assert broken is training.raw[2]
    earlier.extend(later)
    assert [sample.step for sample in earlier.readiness] == [sample.step for sample in whole.readiness]
    earlier.readiness, whole.readiness = [], []
    assert earlier == whole


def test_events_are_sent_after_a_device_failed_and_its_steps_count_as_lost() -> None:
    """Every read of the failed device raises."""
    training, process, offered = nine_steps()
    lost: list[int] = []
    process._place = Mock()
    process._recorders, process._encoder = [], BatchEncoder(Mock(), process._read, Mock(), lost.append)
    failure = RuntimeError("an illegal memory access was encountered")
    training.clock.times = training.clock.is_ready = Mock(side_effect=failure)  # type: ignore[method-assign]
    for raw in training.raw[:2]:
        process._add_step(raw)
    failed = wire.Event(kind="failed", at_ns=1, step=2, detail={})
    assert all(process._passed(steps) for steps, *_ in offered)
    envelope = Envelope(
        "run", "a" * 16, "b" * 16, 0, 2, seq=1, emitted=9, dropped=0, anchor=wire.Anchor(wall_ns=1, monotonic_ns=1)
    )
    batch = process._encode([*(steps for steps, *_ in offered), failed], envelope)
    assert batch.events == [failed]
    assert batch.steps is None
    assert lost == [raw.records for raw in training.raw[:2]]


def test_steps_are_offered_together_except_those_that_the_device_has_not_finished() -> None:
    training, process, offered = nine_steps()
    late = training.raw[6].end
    for raw in training.raw:
        if raw.end == late:
            training.clock.is_ready = lambda stamp: stamp < late  # type: ignore[method-assign]
        process._add_step(raw)
    for _ in range(2):
        process._offer_steps()
    assert [steps.number for steps, *_ in offered] == [[0, 1, 2], [3, 4, 5], 6, 7, 8]
    # A step has two buckets; every other step has its parameters' readiness.
    assert [records for _, records, _ in offered] == [11, 10, 4, 3, 4]
    assert [weight for *_, weight in offered] == [3, 3, 1, 1, 1]
