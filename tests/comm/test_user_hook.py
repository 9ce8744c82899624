"""How a communication hook's result is waited for, with streams that stand for a device's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpobs.buckets.bucket import Bucket
from ddpobs.comm import CommHook

DEVICE = torch.device("cuda", 1)


class Stream:
    """Is the current one, or is not."""

    device = DEVICE
    current = False

    def __enter__(self) -> None:
        self.current = True

    def __exit__(self, *_: object) -> None:
        self.current = False


def half(parameter: torch.nn.Parameter) -> Bucket:
    bucket = Bucket(0, [0], [parameter], sparse=False, as_views=False)
    bucket.set_dtype(torch.float16)
    return bucket


def doubled(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer().fill_(2))
    return done


def test_what_mixed_precision_writes_on_a_stream_of_its_own_is_waited_for_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameter, stream = torch.nn.Parameter(torch.zeros(3)), Stream()
    parameter.grad = torch.ones(3)
    waited: list[tuple[Any, list[float]]] = []

    def current(device: torch.device) -> Any:
        assert parameter.grad is not None
        at = parameter.grad.tolist()
        return SimpleNamespace(wait_stream=lambda other: waited.append(((device, other), at)))

    monkeypatch.setattr(torch.accelerator, "current_stream", current)
    CommHook(SimpleNamespace(upcast_stream=stream), doubled).launch(half(parameter), last=True).wait()
    assert waited == [((DEVICE, stream), [1.0, 1.0, 1.0])]
    assert parameter.grad.tolist() == [2.0, 2.0, 2.0]


def test_mixed_precision_is_done_when_its_own_stream_gets_there() -> None:
    stream = Stream()
    told: list[bool] = []
    bucket = half(torch.nn.Parameter(torch.zeros(3)))
    pending = CommHook(SimpleNamespace(upcast_stream=stream), doubled).launch(bucket, last=True)
    pending.on_done(lambda _: told.append(stream.current))
    assert told == [True]
