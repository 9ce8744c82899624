"""What is kept of a Kineto trace's events."""

from __future__ import annotations

import numpy as np
import pytest

from ddpobs.imports import kineto_events
from ddpobs.imports.kineto_events import Computation, Kernels
from ddpobs.imports.kineto_json import Copy, Correlation, Event, Launch


def launch(began_us: float, correlation: int) -> Launch:
    return Launch(ts=began_us, args=Correlation(correlation))


def copy(began_us: float, took_us: float, correlation: int) -> Copy:
    return Copy(ts=began_us, dur=took_us, args=Correlation(correlation))


def test_a_kernel_is_joined_with_the_last_call_of_its_correlation() -> None:
    kernels = Kernels()
    kernels.extend_launches([launch(1, 7), launch(5, 3), launch(2, 7)])
    kernels.extend([copy(10, 4, 3), copy(20, 1, 7), copy(0, 99, 8)])
    is_known, launched_ns = kernels.launched_ns(np.array([8, 7, 3]))
    assert is_known.tolist() == [False, True, True]
    assert launched_ns.tolist() == [2_000, 5_000]
    # What is launched at 2 ends after what is launched at 5: until then the device is not done with either.
    assert kernels.device_ns().tolist() == [[2_000, 21_000], [5_000, 21_000]]


def test_a_trace_without_kernels_has_no_launches() -> None:
    assert Kernels().device_ns().shape == (0, 2)
    assert Computation().union().shape == (0, 2)


def test_computation_is_the_same_whenever_it_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kineto_events, "_LONGEST_UNION", 2)
    computation = Computation()
    for pieces in (
        [Event(ts=0, dur=2), Event(ts=1, dur=3), Event(ts=9, dur=-1)],
        [Event(ts=4, dur=1)],
        [Event(ts=7.5, dur=0.25), Event(ts=6, dur=1)],
    ):
        computation.extend(pieces)
    assert computation.union().tolist() == [[0, 5_000], [6_000, 7_000], [7_500, 7_750], [9_000, 9_000]]
