"""Where the later stages of an exchange run on a device, with streams that stand for its own."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from ddpobs.comm import multi_stage
from ddpobs.comm.multi_stage import Stages

DEVICE = torch.device("cuda", 1)


class Stream:
    """Writes down who waits for what."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def record_event(self) -> str:
        self.told.append(f"{self.name} records")
        return self.name

    def wait_event(self, event: str) -> None:
        self.told.append(f"{self.name} waits for {event}")


def test_the_backward_s_stream_waits_for_no_stage_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    at_rest = threading.Event()
    backward = Stream("backward", told)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: {DEVICE: backward}[device])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(f"another on {device}", told))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: told.append(f"thread is on {device}"))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: told.append(f"thread takes {stream.name}"))
    made: Any = object()
    jobs: Any = SimpleQueue()
    threading.Thread(target=multi_stage._run_jobs, args=(jobs, DEVICE), daemon=True).start()
    exchange = Stages(made)
    exchange._queues[DEVICE] = made, jobs
    pending = exchange.run(lambda group: told.append(f"stages with {group is made}"), DEVICE)
    pending.on_done(lambda _: at_rest.set())
    assert at_rest.wait(30)
    pending.wait()
    jobs.put(None)
    assert told == [
        "backward records",
        "thread is on cuda:1",
        "thread takes another on cuda:1",
        "another on cuda:1 waits for backward",
        "stages with True",
        "another on cuda:1 records",
        "backward waits for another on cuda:1",
    ]
