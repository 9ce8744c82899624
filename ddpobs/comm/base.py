"""The interface between the reducer and a communication strategy, and a base class for strategies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from ddpobs.buckets.bucket import Bucket
from ddpobs.torch_seam.collectives import value_of


class Pending(Protocol):
    """A launched exchange."""

    def wait(self) -> None:
        """Return when the bucket holds the result (on CUDA: when the current stream will wait for it)."""
        ...

    def on_done(self, callback: Callable[[object], None]) -> None:
        """Call `callback` when the exchange completes, on the thread that completes it."""
        ...


class BucketComm(Protocol):
    """A communication strategy on one process group.

    Attributes:
        name: The strategy's name in telemetry.
        divides: Whether the reducer divides gradients by the number of ranks before `launch`.
        carries_nan: Whether a NaN in the first element of one rank's buffer is sure to reach every rank's result.
    """

    name: str
    divides: bool
    carries_nan: bool

    def launch(self, bucket: Bucket, last: bool) -> Pending:
        """Start the exchange of a full bucket, without blocking.

        The first launch alone may block, to create process groups together with the other ranks.

        Args:
            bucket: The full bucket. Every rank launches the buckets in the same order.
            last: Whether it is the backward's last bucket.
        """
        ...


CommFactory = Callable[[dist.ProcessGroup], BucketComm]
"""Creates the strategy for one process group: a class of this package, `functools.partial` of a class, or the user's.

The factory is pickled with the module. If a module is copied on one rank alone, the factory is called on that rank
alone. A step that needs the other ranks must therefore wait for the first `launch`.
"""


class FuturePending:
    """Pending until a torch future is done.

    On CUDA, `wait` makes the current stream wait for the kernels that wrote the future's value, and for nothing else.
    The value must therefore be the bucket's buffer.
    """

    __slots__ = ("_future",)

    def __init__(self, future: torch.futures.Future[torch.Tensor]) -> None:
        self._future = future

    def wait(self) -> None:
        """As `Pending.wait`; raises the exchange's error if it failed."""
        value_of(self._future)

    def on_done(self, callback: Callable[[object], None]) -> None:
        """As `Pending.on_done`."""
        self._future.add_done_callback(callback)


class SkippedBucket:
    """Pending of a bucket that is not exchanged."""

    def wait(self) -> None:
        """Return at once."""

    def on_done(self, callback: Callable[[object], None]) -> None:
        """Never call `callback`."""
