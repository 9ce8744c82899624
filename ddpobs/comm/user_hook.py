"""The user's communication hook, called as torch's DDP calls it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from ddpobs.buckets.bucket import Bucket
from ddpobs.torch_seam.collectives import value_of

Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


class GradBucket:
    """A bucket with the interface that torch gives to communication hooks.

    Attributes:
        bucket: The reducer's bucket.
    """

    def __init__(self, bucket: Bucket, last: bool) -> None:
        self.bucket, self._last = bucket, last
        self._flat = _real(bucket.buffer)
        self._buffer = bucket.parameters[0].grad if bucket.sparse else self._flat

    def index(self) -> int:
        """The bucket's index in launch order."""
        return self.bucket.index

    def is_last(self) -> bool:
        """Whether it is the backward's last bucket."""
        return self._last

    def buffer(self) -> torch.Tensor:
        """The flat gradients, one-dimensional, not divided by the number of ranks.

        Complex gradients are pairs of real numbers.
        """
        assert self._buffer is not None
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the buffer by another tensor."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Each parameter's part of the buffer, or of the tensor that replaced it."""
        if self.bucket.sparse:
            return [self.buffer()]
        if not self.bucket.buffer.is_complex():
            return list(self.bucket.views) if self._buffer is self._flat else self.bucket.parts_of(self.buffer())
        pairs = torch.view_as_complex(self.buffer().view(-1, 2))
        return [torch.view_as_real(part) for part in self.bucket.parts_of(pairs)]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the same order."""
        return list(self.bucket.parameters)


class CommHook:
    """Runs the user's hook on each bucket and writes the result back."""

    divides = False
    carries_nan = False

    def __init__(self, state: object, hook: Hook) -> None:
        self._state, self._hook = state, hook
        # Torch's mixed precision sets it. The hook's future does not depend on that stream; torch waits for the
        # stream after the buckets.
        self._stream: Any = getattr(state, "upcast_stream", None)
        self.name = getattr(hook, "__qualname__", type(hook).__name__)

    def launch(self, bucket: Bucket, last: bool) -> _Pending:
        """Call the hook, which starts the communication."""
        return _Pending(bucket, self.run(GradBucket(bucket, last)), self._stream)

    def run(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Return the hook's future; also for a rank that is out of data and takes part with zeros."""
        return self._hook(self._state, bucket)


class _Pending:
    __slots__ = ("_bucket", "_future", "_stream")

    def __init__(self, bucket: Bucket, future: torch.futures.Future[torch.Tensor], stream: Any) -> None:
        self._bucket, self._future, self._stream = bucket, future, stream

    def wait(self) -> None:
        value: Any = value_of(self._future)
        if self._stream is not None:
            torch.accelerator.current_stream(self._stream.device).wait_stream(self._stream)
        result: torch.Tensor = value[0] if isinstance(value, list) else value
        if self._bucket.sparse:
            self._bucket.parameters[0].grad = result
        elif self._bucket.casts:
            self._bucket.write_back(result)
        elif result.data_ptr() != self._bucket.buffer.data_ptr():
            _real(self._bucket.buffer).copy_(_real(result.view(-1)))

    def on_done(self, callback: Callable[[object], None]) -> None:
        # A future without a stream calls back at once, on the current stream.
        with self._stream or nullcontext():
            self._future.add_done_callback(callback)


def _real(flat: torch.Tensor) -> torch.Tensor:
    """View complex numbers as pairs of real ones, as torch does for hooks; a cast would drop the imaginary parts."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
