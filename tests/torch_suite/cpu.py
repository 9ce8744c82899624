"""Torch's tests on a machine without a GPU: their requirements are lifted, and every CUDA device is the CPU.

Call `lift_gpu_requirements` before the module with the tests is imported: its decorators run at import.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

CPU = torch.device("cpu")


def lift_gpu_requirements() -> None:
    """Run the tests that require GPUs, and move nothing to them."""
    common_distributed.skip_if_lt_x_gpu = _lifted
    common_distributed.nccl_skip_if_lt_x_gpu = _lifted
    common_distributed.requires_nccl = _lifted
    common_distributed.skip_if_no_gpu = _lifted()
    move = nn.Module.to
    nn.Module.cuda = lambda module, *_args, **_kwargs: module  # type: ignore[method-assign]
    nn.Module.to = lambda module, *args, **kwargs: move(  # type: ignore[assignment, method-assign]
        module, *map(_on_cpu, args), **{name: _on_cpu(value) for name, value in kwargs.items()}
    )
    for name in ("set_device", "synchronize", "manual_seed", "empty_cache"):
        setattr(torch.cuda, name, lambda *_args, **_kwargs: None)
    torch.cuda.current_device = lambda: 0
    torch.cuda.device = lambda *_args, **_kwargs: contextlib.nullcontext()  # type: ignore[assignment, misc]
    torch.Stream = CpuStream  # type: ignore[misc]


class CpuStream(torch.Stream):
    """A stream of the CPU. A build for CUDA makes one of a device by default, which fails without a driver."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> CpuStream:
        return super().__new__(cls, device=CPU)


class CpuTensors(TorchFunctionMode):
    """Creates every tensor on the CPU, and moves none."""

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "cuda":
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if name == "to" and len(args) > 1:
            args = (args[0], _on_cpu(args[1]), *args[2:])
        return func(*args, **kwargs)


def _lifted(*_args: Any, **_kwargs: Any) -> Callable[[Any], Any]:
    """A decorator that leaves the test as it is."""
    return lambda test: test


def _on_cpu(value: Any) -> Any:
    """The CPU in the place of a CUDA device or a device's number; any other value unchanged."""
    numbered = isinstance(value, int) and not isinstance(value, bool)
    named = str(value).startswith("cuda") and isinstance(value, str | torch.device)
    return CPU if numbered or named else value
