"""The interface between the reducer and what is done with a full bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from ddpobs.buckets.bucket import Bucket
from ddpobs.torch_seam.collectives import value_of


class Pending(Protocol):
    """A launched communication."""

    def wait(self) -> None:
        """Return when the bucket holds the result (on CUDA: when the current stream will wait for it)."""
        ...

    def on_done(self, told: Callable[[object], None]) -> None:
        """Have `told` called when it completes, from whatever thread sees that."""
        ...


class BucketComm(Protocol):
    """What is done with a full bucket.

    Attributes:
        name: What telemetry calls it.
        divides: Whether the reducer divides gradients by the number of ranks before `launch`.
        carries_nan: Whether a NaN in the first element of one rank's buffer is sure to be in every rank's result.
    """

    name: str
    divides: bool
    carries_nan: bool

    def launch(self, bucket: Bucket, last: bool) -> Pending:
        """Start it, in the same order on every rank; only a first one may wait, for groups that all ranks make."""
        ...


CommFactory = Callable[[dist.ProcessGroup], BucketComm]
"""Makes what handles the buckets of one process group: a class of this package, `functools.partial` of one, or a
user's own. It is pickled with the module, and called on one rank alone where a module is copied there: what needs
the other ranks waits for the first `launch`."""


class FuturePending:
    """Pending until a future of torch's is done.

    On CUDA `wait` has the current stream wait for what wrote the future's value, and for nothing else: that has to be
    the bucket's buffer.
    """

    __slots__ = ("_future",)

    def __init__(self, future: torch.futures.Future[torch.Tensor]) -> None:
        self._future = future

    def wait(self) -> None:
        """As `Pending.wait`; an error in the exchange comes out here."""
        value_of(self._future)

    def on_done(self, told: Callable[[object], None]) -> None:
        """As `Pending.on_done`."""
        self._future.add_done_callback(told)


class SkippedBucket:
    """Stands where a bucket was left out."""

    def wait(self) -> None:
        """At once."""

    def on_done(self, told: Callable[[object], None]) -> None:
        """Never."""
