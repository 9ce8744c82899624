"""The streams on which the later stages of an exchange run, with stand-ins for a device's streams."""

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
    """Logs its events and waits."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record_event(self) -> str:
        self.log.append(f"{self.name} records")
        return self.name

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


def test_the_backward_stream_waits_for_a_stage_only_in_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    at_rest = threading.Event()
    backward = Stream("backward", log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: {DEVICE: backward}[device])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(f"another on {device}", log))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: log.append(f"thread is on {device}"))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: log.append(f"thread takes {stream.name}"))
    side_group: Any = object()
    jobs: Any = SimpleQueue()
    threading.Thread(target=multi_stage._run_jobs, args=(jobs, DEVICE), daemon=True).start()
    exchange = Stages(side_group)
    exchange._queues[DEVICE] = side_group, jobs
    pending = exchange.run(lambda group: log.append(f"stages with {group is side_group}"), DEVICE)
    pending.on_done(lambda _: at_rest.set())
    assert at_rest.wait(30)
    pending.wait()
    jobs.put(None)
    assert log == [
        "backward records",
        "thread is on cuda:1",
        "thread takes another on cuda:1",
        "another on cuda:1 waits for backward",
        "stages with True",
        "another on cuda:1 records",
        "backward waits for another on cuda:1",
    ]
