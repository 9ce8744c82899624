"""Times of the used-parameter map's collective, with a stand-in for a device's work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpobs.reducer import used_map
from ddpobs.reducer.used_map import UsedMap


@pytest.mark.parametrize(("stamp", "records"), [(7, 1), (0, 0)])
def test_a_map_without_a_stamp_as_in_a_graphs_capture_gets_no_callback(
    stamp: int, records: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    callbacks: list[Any] = []
    communicated: list[Any] = []
    future = SimpleNamespace(add_done_callback=callbacks.append)
    work: Any = SimpleNamespace(get_future=lambda: future)
    recorder: Any = SimpleNamespace(now=lambda: stamp, communicated=lambda *facts: communicated.append(facts))
    monkeypatch.setattr(used_map, "wait_for", lambda _: None)
    used = UsedMap(3, torch.device("cpu"), lambda _: work, recorder)
    used.launch([1])
    used.wait()
    assert used.read().tolist() == [1, 0, 1, 0]
    assert (len(callbacks), len(communicated)) == (records, records)
