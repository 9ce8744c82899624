"""What the map of used parameters asks of its collective, with a work that stands for a device's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpobs.reducer import used_map
from ddpobs.reducer.used_map import UsedMap


@pytest.mark.parametrize(("stamp", "told"), [(7, 1), (0, 0)])
def test_a_map_in_a_graph_s_capture_where_no_stamp_is_taken_is_followed_on_no_other_stream(
    stamp: int, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed: list[Any] = []
    communicated: list[Any] = []
    future = SimpleNamespace(add_done_callback=followed.append)
    work: Any = SimpleNamespace(get_future=lambda: future)
    recorder: Any = SimpleNamespace(now=lambda: stamp, communicated=lambda *facts: communicated.append(facts))
    monkeypatch.setattr(used_map, "wait_for", lambda _: None)
    used = UsedMap(3, torch.device("cpu"), lambda _: work, recorder)
    used.launch([1])
    used.wait()
    assert used.read().tolist() == [1, 0, 1, 0]
    assert (len(followed), len(communicated)) == (told, told)
