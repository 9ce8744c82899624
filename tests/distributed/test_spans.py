"""When a bucket is done: each one's own completion, whatever the others' are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ddpobs import DistributedDataParallel, comm
from tests.distributed.compare import batch, net
from tests.distributed.launch import run_ranks
from tests.distributed.sent import sending
from tests.distributed.test_comm import CAP

LATE_S = 0.2
STEPS = 4


class Late:
    """A bucket that is done so much later."""

    def __init__(self, pending: Any) -> None:
        self._pending, self._done = pending, threading.Event()
        self._timer = threading.Timer(LATE_S, self._done.set)

    def wait(self) -> None:
        self._pending.wait()
        self._done.wait()

    def on_done(self, told: Callable[[object], None]) -> None:
        self._timer.function = lambda: (told(None), self._done.set())
        self._timer.start()


def first_bucket_late(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """When the first bucket and the last one were done, by step."""
    plain = comm.AllReduce.launch

    def launch(self: comm.AllReduce, bucket: Any, last: bool) -> Any:
        pending = plain(self, bucket, last)
        return Late(pending) if bucket.index == 0 else pending

    with sending() as sent:
        ddp = DistributedDataParallel(net(), telemetry=sent.config, **CAP)
        comm.AllReduce.launch = launch  # type: ignore[method-assign, assignment]
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        for step in range(STEPS):
            optimizer.zero_grad()
            ddp(batch(rank, step)).sum().backward()
            optimizer.step()
    bucket, done_ns = np.array(sent.spans("bucket")), np.array(sent.spans("done_ns"))
    return done_ns[bucket == 0].tolist(), done_ns[bucket == bucket.max()].tolist()


def test_the_last_bucket_is_done_when_it_is_and_not_when_an_earlier_one_is() -> None:
    for first_ns, last_ns in run_ranks(first_bucket_late, 2):
        assert len(first_ns) == len(last_ns) == STEPS
        # In every step, where nothing delays the machine; once is enough to tell.
        assert any(last < first for first, last in zip(first_ns, last_ns, strict=True))


def first_backward(rank: int, world_size: int) -> list[tuple[int, bool]]:
    """Of the first step, without and with views: how many buckets, and whether all but the last two went early."""
    found = []
    for views in (False, True):
        with sending() as sent:
            layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
            settings = {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": views, "telemetry": sent.config}
            ddp = DistributedDataParallel(layers, **settings)
            ddp(torch.ones(2, 64)).sum().backward()
        ready_ns, launched_ns = np.array(sent.spans("ready_ns")), np.array(sent.spans("launched_ns"))
        found.append((len(ready_ns), bool((launched_ns[:-2] < ready_ns[-1]).all())))
    return found


def test_the_first_backward_overlaps_already() -> None:
    """Torch's has one bucket where every parameter has to take part."""
    for found in run_ranks(first_backward, 2):
        assert all(buckets > 3 and early for buckets, early in found), found
