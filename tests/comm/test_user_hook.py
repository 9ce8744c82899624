"""The wait for a communication hook's result, with stand-ins for a device's streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpobs.buckets.bucket import Bucket
from ddpobs.comm import CommHook

DEVICE = torch.device("cuda", 1)


class Stream:
    """A stream that records whether it is the current stream."""

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


def test_a_result_on_mixed_precisions_stream_is_waited_for_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameter, stream = torch.nn.Parameter(torch.zeros(3)), Stream()
    parameter.grad = torch.ones(3)
    waited: list[tuple[Any, list[float]]] = []

    def current(device: torch.device) -> Any:
        assert parameter.grad is not None
        gradient = parameter.grad.tolist()
        return SimpleNamespace(wait_stream=lambda other: waited.append(((device, other), gradient)))

    monkeypatch.setattr(torch.accelerator, "current_stream", current)
    CommHook(SimpleNamespace(upcast_stream=stream), doubled).launch(half(parameter), last=True).wait()
    assert waited == [((DEVICE, stream), [1.0, 1.0, 1.0])]
    assert parameter.grad.tolist() == [2.0, 2.0, 2.0]


def test_a_hook_of_mixed_precision_calls_back_on_its_own_stream() -> None:
    stream = Stream()
    is_current: list[bool] = []
    bucket = half(torch.nn.Parameter(torch.zeros(3)))
    pending = CommHook(SimpleNamespace(upcast_stream=stream), doubled).launch(bucket, last=True)
    pending.on_done(lambda _: is_current.append(stream.current))
    assert is_current == [True]
