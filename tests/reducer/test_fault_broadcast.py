"""How an element is looked at that a device has to bring first, with what stands for the device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ddpobs.reducer.fault_broadcast import PendingCheck


def test_a_look_is_over_when_the_element_s_own_device_has_copied_it(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[object] = []
    monkeypatch.setattr(torch, "empty_like", lambda *_, **__: SimpleNamespace(copy_=lambda *_, **__: None))
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=recorded.append))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))
    element = torch.zeros(1, device="meta")
    PendingCheck(element, 1)
    assert recorded == [("stream of", element.device)]
