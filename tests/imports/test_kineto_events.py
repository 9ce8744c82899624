"""What is kept of a Kineto trace's events."""

from __future__ import annotations

import numpy as np
import pytest

from ddpobs.imports import kineto_events
from ddpobs.imports.kineto_events import Args, Computation, Event, Kernels


def event(began_us: float, took_us: float = 0.0, correlation: int = 0) -> Event:
    return Event(ts=began_us, dur=took_us, args=Args(correlation=correlation))


def test_a_kernel_is_joined_with_the_last_call_of_its_correlation() -> None:
    kernels = Kernels()
    kernels.extend_launches([event(1, correlation=7), event(5, correlation=3), event(2, correlation=7)])
    kernels.extend([event(10, 4, correlation=3), event(20, 1, correlation=7), event(0, 99, correlation=8)])
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
    for pieces in ([event(0, 2), event(1, 3), event(9, -1)], [event(4, 1)], [event(7.5, 0.25), event(6, 1)]):
        computation.extend(pieces)
    assert computation.union().tolist() == [[0, 5_000], [6_000, 7_000], [7_500, 7_750], [9_000, 9_000]]
