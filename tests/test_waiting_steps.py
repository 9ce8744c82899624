"""How closed steps wait for their batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from ddpobs import TelemetryConfig
from ddpobs.rawsteps import RawSteps
from ddpobs.telemetry import Telemetry
from tests.test_recorder import Training, plain_step


def nine_steps() -> tuple[Training, Telemetry, list[tuple[Any, int, int]]]:
    """Closed, and telemetry for them that offers as told: what, for how many records, in how many places."""
    training = Training()
    offered: list[tuple[Any, int, int]] = []
    process = Telemetry.__new__(Telemetry)
    process._clock, process._steps, process._config = training.clock, RawSteps(), TelemetryConfig(batch_spans=40)
    process._exporter = SimpleNamespace(offer=lambda *told: offered.append((*told, 1)[:3]))  # type: ignore[assignment]
    for _ in range(9):
        plain_step(training)
    training.steps()
    return training, process, offered


def test_an_error_of_the_device_spoils_no_later_step() -> None:
    training, process, offered = nine_steps()
    training.clock.times = broken = Mock(side_effect=RuntimeError("unspecified launch failure"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="launch failure"):
        process._add_step(training.raw[0])
    broken.side_effect = lambda stamps: stamps
    for raw in training.raw[1:4]:
        process._add_step(raw)
    process._offer_steps()
    assert [told.number for told, *_ in offered] == [[1, 2, 3]]


def test_steps_wait_together_but_those_that_the_device_is_not_through() -> None:
    training, process, offered = nine_steps()
    late = training.raw[6].end
    for raw in training.raw:
        if raw.end == late:
            training.clock.passed = lambda stamp: stamp < late  # type: ignore[method-assign]
        process._add_step(raw)
    for _ in range(2):
        process._offer_steps()
    assert [told.number for told, *_ in offered] == [[0, 1, 2], [3, 4, 5], 6, 7, 8]
    # A step has two buckets, and every other one has its parameters' readiness.
    assert [records for _, records, _ in offered] == [11, 10, 4, 3, 4]
    assert [places for *_, places in offered] == [3, 3, 1, 1, 1]
