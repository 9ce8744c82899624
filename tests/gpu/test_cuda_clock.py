"""CUDA event times agree with the work around them, and recording them does not delay training."""

from __future__ import annotations

import time

import pytest
import torch

from ddpobs.clocks import CudaClock

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none")


def test_a_stamp_does_not_wait_for_the_device() -> None:
    clock = CudaClock(torch.device("cuda"))
    work = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    for _ in range(20):
        work = work @ work
    stamp = clock.now()
    assert not clock.is_ready(stamp), "twenty large products are still queued on the device"
    clock.nanoseconds(stamp)
    assert clock.is_ready(stamp)


def test_device_times_lie_between_the_host_times_around_them() -> None:
    clock = CudaClock(torch.device("cuda"))
    torch.cuda.synchronize()
    begin_ns = time.monotonic_ns()
    stamps = [clock.now() for _ in range(3)]
    torch.cuda.synchronize()
    end_ns = time.monotonic_ns()
    times = [clock.nanoseconds(stamp) for stamp in stamps]
    slack_ns = 200_000
    assert begin_ns - slack_ns <= times[0] <= times[1] <= times[2] <= end_ns + slack_ns
