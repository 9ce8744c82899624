"""Imports of telemetry's threads: one takes milliseconds of the interpreter from a step."""

from __future__ import annotations

import sys
import threading
from typing import Any

import ddpobs
from tests.support.distributed.compare import batch, net
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import sending
from tests.support.distributed.sharded import sharded, train_sharded

STEPS = 40


def imported(rank: int, _size: int, door: str) -> tuple[int, list[str]]:
    """Return the number of batches, and the modules that telemetry's threads imported meanwhile."""
    modules: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "import" and threading.current_thread().name.startswith("ddpobs-"):
            modules.append(arguments[0])

    sys.addaudithook(note)
    with sending() as sent:
        if door == "fsdp":
            model = sharded()
            ddpobs.attach(model, sent.config)
            train_sharded(model, rank, STEPS)
        else:
            model = ddpobs.DistributedDataParallel(net(), telemetry=sent.config)
            for step in range(STEPS):
                model(batch(rank, step)).sum().backward()
    return len(sent.batches), modules


def test_telemetrys_threads_import_nothing() -> None:
    for door in ("ddp", "fsdp"):
        for batches, modules in run_ranks(imported, 2, door):
            assert batches > 0
            assert modules == []
