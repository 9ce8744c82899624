"""Telemetry that cannot start: one line has the reason, nothing of it remains, and the training goes on without it."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import ddpobs
import ddpobs.horovod as hvd
from ddpobs import telemetry
from ddpobs.titan.spans import SpanHandler
from tests.support.distributed.compare import batch, net
from tests.support.distributed.engines import engine, find_deepspeed
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import sending
from tests.support.distributed.sharded import sharded
from tests.support.layers import DOORS

_SYSTEM = {"posix", "_io", "_socket", "mmap", "_thread", "_signal", "fcntl", "select"}
"""Modules of the interpreter whose functions are system calls, or make them."""
_NO_CALLS = {"fspath", "get_ident", "allocate_lock", "RLock", "getpid", "text_encoding", "daemon_threads_allowed"}
"""Functions of theirs that make none, or that cannot fail."""
_MAX_CALLS = 1000


class Failing:
    """Makes one system call of the current thread fail: the one with that number, counted from 0.

    Attributes:
        name: Name of the call that failed; empty before.
    """

    def __init__(self, number: int) -> None:
        self._left, self.name = number, ""

    def __enter__(self) -> Failing:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _called(self, _frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call" or getattr(function, "__module__", None) not in _SYSTEM or self.name:
            return
        if function.__name__ in _NO_CALLS:
            return
        self._left -= 1
        if self._left < 0:
            self.name = f"{function.__module__}.{function.__name__}"
            if "thread" in function.__name__:
                raise RuntimeError("can't start new thread")
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class Logged(logging.Handler):
    """Records of ddpobs' log."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def __enter__(self) -> Logged:
        logging.getLogger("ddpobs").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("ddpobs").removeHandler(self)


def own(config: ddpobs.TelemetryConfig) -> Any:
    return ddpobs.DistributedDataParallel(net(), telemetry=config)


def attached(config: ddpobs.TelemetryConfig) -> Any:
    model = TorchDDP(net())
    ddpobs.attach(model, config)
    return model


def horovod(config: ddpobs.TelemetryConfig) -> Any:
    hvd.init()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters(), telemetry=config)
    model.register_full_backward_hook(lambda *_: (wrapped, None)[1])  # It lives as long as the model.
    return model


def fully_sharded(config: ddpobs.TelemetryConfig) -> Any:
    model = sharded()
    ddpobs.attach(model, config)
    return model


def titan(config: ddpobs.TelemetryConfig) -> Any:
    model = net()
    spans = SpanHandler(config)
    spans.emit(logging.makeLogRecord({"log_type_name": "optim_start"}))
    model.register_full_backward_hook(lambda *_: (spans, None)[1])  # It lives as long as the model.
    return model


def deepspeed(config: ddpobs.TelemetryConfig) -> Any:
    model = engine(1)
    ddpobs.attach(model, config)
    return model


BUILD = {
    "ddp": own,
    "attachment": attached,
    "fsdp": fully_sharded,
    "deepspeed": deepspeed,
    "horovod": horovod,
    "titan": titan,
}
"""Builds a model that trains through a door, by the door's folder."""


def leftovers() -> list[str]:
    """Return what is left of telemetry in this process, and remove places."""
    places = list(Path("/dev/shm").glob(f"ddpobs-*-{os.getpid()}-*"))
    for path in places:
        path.unlink()
    return [
        *(thread.name for thread in threading.enumerate() if "ddpobs" in thread.name),
        *(path.name for path in places),
        *(["a hook on backward"] if hasattr(torch.autograd.backward, "__wrapped__") else []),
        *(["a handler of SIGTERM"] if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL else []),
        *(["a hook on garbage collection"] if any("ddpobs" in repr(hook) for hook in gc.callbacks) else []),
    ]


def start(build: Callable[[ddpobs.TelemetryConfig], Any], number: int) -> tuple[str, str]:
    """Train one step with a telemetry of whose start that system call fails.

    Returns:
        The name of the call, empty if the start makes fewer, and what is wrong, empty if nothing is.
    """
    join, failing = telemetry.join, Failing(number)

    def failing_join(*args: Any, **kwargs: Any) -> Any:
        with failing:
            return join(*args, **kwargs)

    telemetry._failed_in = None
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with Logged() as logged, sending() as capture, patch.object(telemetry, "join", failing_join):
        model = build(capture.config)
        model(batch(0, 0)).sum().backward()
        is_started = telemetry._process is not None
    del model
    gc.collect()
    lines = [record.getMessage() for record in logged.records]
    wrong = leftovers() + [line for record, line in zip(logged.records, lines, strict=True) if record.exc_info]
    if not is_started and sum(line.startswith("ddpobs: no telemetry: ") for line in lines) != 1:
        wrong += ["no line has the reason", *lines]
    return failing.name, "; ".join(wrong)


def fail_in_turn(_rank: int, _size: int, door: str) -> dict[str, str]:
    """Return what is wrong by failing system call, with its number."""
    found: dict[str, str] = {}
    for number in range(_MAX_CALLS):
        name, wrong = start(BUILD[door], number)
        if not name:
            return found
        found[f"{number} {name}"] = wrong
    raise AssertionError("the start makes too many system calls")


def test_every_door_is_tried() -> None:
    assert sorted(BUILD) == sorted(DOORS)


@pytest.mark.parametrize(
    "door", [pytest.param(door, marks=[pytest.mark.wide] if door != "ddp" else []) for door in DOORS]
)
def test_whichever_system_call_of_the_start_fails_the_training_goes_on(door: str) -> None:
    if door == "deepspeed":
        find_deepspeed()
    found: dict[str, str]
    (found,) = run_ranks(fail_in_turn, 1, door)
    assert {name.split()[1] for name in found} >= {"posix.open", "posix.pipe", "_thread.start_new_thread"}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
