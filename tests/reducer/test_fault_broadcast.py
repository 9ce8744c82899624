"""The check of a flag that a device has yet to deliver, with a stand-in for the device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ddpobs.reducer.fault_broadcast import PendingCheck


def test_a_check_waits_for_the_stream_of_the_flags_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[object] = []
    monkeypatch.setattr(torch, "empty_like", lambda *_, **__: SimpleNamespace(copy_=lambda *_, **__: None))
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=recorded.append))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))
    element = torch.zeros(1, device="meta")
    PendingCheck(element, 1)
    assert recorded == [("stream of", element.device)]
