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
    """A bucket as communication hooks see it, with torch's own members.

    Attributes:
        bucket: The reducer's.
    """

    def __init__(self, bucket: Bucket, last: bool) -> None:
        self.bucket, self._last = bucket, last
        self._flat = _real(bucket.buffer)
        self._buffer = bucket.parameters[0].grad if bucket.sparse else self._flat

    def index(self) -> int:
        """The bucket's place in launch order."""
        return self.bucket.index

    def is_last(self) -> bool:
        """Whether it is the last one launched."""
        return self._last

    def buffer(self) -> torch.Tensor:
        """The flat gradients, one dimension, not divided by the number of ranks; complex ones as pairs of real ones."""
        assert self._buffer is not None
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Put another tensor in the buffer's place."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Each parameter's part of the buffer, also of one that was put in its place."""
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
    """Runs the user's hook on each bucket and puts its result back."""

    divides = False
    carries_nan = False

    def __init__(self, state: object, hook: Hook) -> None:
        self._state, self._hook = state, hook
        # Of torch's mixed precision. Its future does not know the stream, for which torch waits after the buckets.
        self._stream: Any = getattr(state, "upcast_stream", None)
        self.name = getattr(hook, "__qualname__", type(hook).__name__)

    def launch(self, bucket: Bucket, last: bool) -> _Pending:
        """Call the hook, which starts the communication."""
        return _Pending(bucket, self.run(GradBucket(bucket, last)), self._stream)

    def run(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The hook's future; also for a rank that has run out of data and only takes part."""
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

    def on_done(self, told: Callable[[object], None]) -> None:
        with self._stream or nullcontext():  # A future that knows no stream calls at once, on the current one.
            self._future.add_done_callback(told)


def _real(flat: torch.Tensor) -> torch.Tensor:
    """As torch hands it to hooks: a cast would take the imaginary parts away."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
