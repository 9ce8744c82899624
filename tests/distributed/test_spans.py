"""The completion of each bucket is its own, independent of the other buckets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ddpobs import DistributedDataParallel, comm
from tests.support.distributed.compare import CAP, batch, net
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import sending

LATE_S = 0.2
STEPS = 4


class Late:
    """A bucket with a completion delayed by `LATE_S`."""

    def __init__(self, pending: Any) -> None:
        self._pending, self._done = pending, threading.Event()

    def wait(self) -> None:
        self._pending.wait()
        self._done.wait()

    def on_done(self, callback: Callable[[object], None]) -> None:
        def end() -> None:
            callback(None)
            self._done.set()

        threading.Timer(LATE_S, end).start()


def first_bucket_late(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """Return the completions of the first and the last bucket, by step."""
    original = comm.AllReduce.launch

    def launch(self: comm.AllReduce, bucket: Any, last: bool) -> Any:
        pending = original(self, bucket, last)
        return Late(pending) if bucket.index == 0 else pending

    with sending() as capture:
        ddp = DistributedDataParallel(net(), telemetry=capture.config, **CAP)
        comm.AllReduce.launch = launch  # type: ignore[method-assign]
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        for step in range(STEPS):
            optimizer.zero_grad()
            ddp(batch(rank, step)).sum().backward()
            optimizer.step()
    bucket, done_ns = np.array(capture.spans("bucket")), np.array(capture.spans("done_ns"))
    return done_ns[bucket == 0].tolist(), done_ns[bucket == bucket.max()].tolist()


def test_the_completion_of_the_last_bucket_does_not_wait_for_an_earlier_one() -> None:
    for first_ns, last_ns in run_ranks(first_bucket_late, 2):
        assert len(first_ns) == len(last_ns) == STEPS
        # True in every step unless the machine is delayed; one step is enough evidence.
        assert any(last < first for first, last in zip(first_ns, last_ns, strict=True))


def first_backward(rank: int, world_size: int) -> list[tuple[int, bool]]:
    """Return the number of buckets in the first step, and whether all but the last two were launched early.

    Without and with `gradient_as_bucket_view`.
    """
    results = []
    for views in (False, True):
        with sending() as capture:
            layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
            settings: dict[str, Any] = {
                "bucket_cap_mb": 0.01,
                "gradient_as_bucket_view": views,
                "telemetry": capture.config,
            }
            ddp = DistributedDataParallel(layers, **settings)
            ddp(torch.ones(2, 64)).sum().backward()
        ready_ns, launched_ns = np.array(capture.spans("ready_ns")), np.array(capture.spans("launched_ns"))
        results.append((len(ready_ns), bool((launched_ns[:-2] < ready_ns[-1]).all())))
    return results


def test_the_first_backward_overlaps_communication() -> None:
    """Torch's DDP has a single bucket in its first backward if every parameter must take part."""
    for results in run_ranks(first_backward, 2):
        assert all(buckets > 3 and early for buckets, early in results), results
