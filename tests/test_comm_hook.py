"""How a communication hook's result is waited for, with streams that stand for a device's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpobs.buckets import Bucket
from ddpobs.comm import CommHook


def test_what_mixed_precision_writes_on_a_stream_of_its_own_is_waited_for_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cuda", 1)
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    bucket = Bucket(0, [0], [parameter], sparse=False, as_views=False)
    bucket.hold_in(torch.float16)
    stream = SimpleNamespace(device=device)
    waited: list[tuple[Any, list[float]]] = []

    def current(of: torch.device) -> Any:
        assert parameter.grad is not None
        at = parameter.grad.tolist()
        return SimpleNamespace(wait_stream=lambda other: waited.append(((of, other), at)))

    def hook(_: object, given: Any) -> torch.futures.Future[torch.Tensor]:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(given.buffer().fill_(2))
        return done

    monkeypatch.setattr(torch.accelerator, "current_stream", current)
    CommHook(SimpleNamespace(upcast_stream=stream), hook).launch(bucket, last=True).wait()
    assert waited == [((device, stream), [1.0, 1.0, 1.0])]
    assert parameter.grad.tolist() == [2.0, 2.0, 2.0]
