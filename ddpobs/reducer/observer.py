"""The contract between gradient reduction and telemetry.

A DDP module has one `Observer`, or None while telemetry is off. Our reducer calls it, and so does `ddpobs.attach` for
torch's own DDP. `ddpobs.recording` implements it. Nothing under `reducer/`, `buckets/`, `comm/` or `torch_seam/`
imports that package.

The calls of one training step, in order:

    observer.forward_began(inputs)           first statement of the module's forward
    record = observer.backward()             first gradient of a synchronised backward; None: record nothing
    record.parameter_ready_ns[i] = now()     one per parameter, in the order of the buckets and their parameters;
                                             None unless this backward is sampled: test it once, not per hook
    record.ready_ns[b] = now()               the last gradient of bucket b is accumulated
    record.launched_ns[b] = now()            bucket b is handed to the process group
    record.done_ns[b] = now()                in a done-callback of the work, never from the order of the waits; of the
                                             last bucket after its wait, which begins as soon as it is launched
    observer.unused(locally, globally)       after each backward that compared the ranks
    observer.finished(record)                every bucket of that backward was waited for

All lists are allocated beforehand, so a stamp in a hook costs one store into a list.

No method blocks: none waits for the device, the disk, the network or another rank. `now` is called on any thread,
because a done-callback runs on the process group's. Every other method is called on the thread that trains, or on
autograd's thread for the module's device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from ddpobs import wire
from ddpobs.clocks import Stamp


class BackwardStamps(Protocol):
    """Stamps of one synchronised backward of one module; 0 for a moment that was not stamped.

    Attributes:
        ready_ns: Per bucket, in launch order: its last gradient was accumulated.
        launched_ns: Per bucket: it was handed to the process group.
        done_ns: Per bucket: its communication was complete.
        parameter_ready_ns: Per parameter, bucket after bucket: its gradient was accumulated. None unless sampled.
        works: By bucket, a collective that measures its own duration. Empty if the backend does not.
        last_ready: The last gradient was accumulated; stamped where the buckets cannot be observed.
        last_bucket: One element, the index of the bucket launched last: a part of the process's place.
    """

    ready_ns: list[Stamp]
    launched_ns: list[Stamp]
    done_ns: list[Stamp]
    parameter_ready_ns: list[Stamp] | None
    works: dict[int, Any]
    last_ready: Stamp
    last_bucket: memoryview[int]


class Observer(Protocol):
    """Receives the facts of one module's steps."""

    @property
    def now(self) -> Callable[[], Stamp]:
        """Take a stamp: nanoseconds of `time.monotonic_ns` on the host, an event of the current stream on CUDA."""
        ...

    def layout(self, buckets: list[wire.Bucket], comm: str) -> None:
        """Record new buckets, in launch order, and the strategy that reduces them. The revision counts up by itself."""
        ...

    def forward_began(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
        """Record that the module's forward was called with these inputs."""
        ...

    def backward(self) -> BackwardStamps | None:
        """Open the record of the synchronised backward that begins.

        None if nothing may be recorded, as while a CUDA graph is captured.
        """
        ...

    def finished(self, record: Any) -> None:
        """Close a record of `backward`. A record that is never closed, as after an error, is dropped."""
        ...

    def communicated(self, kind: str, launched_ns: Stamp, done_ns: Stamp) -> None:
        """Record communication other than gradient buckets; `kind` is one of `wire.COMM_KINDS`."""
        ...

    def unused(self, locally: Iterable[str], globally: Iterable[str]) -> None:
        """Record the parameters without a gradient on this rank, and on every rank. Cheap if they did not change."""
        ...

    def shadowed(self) -> None:
        """Record that this rank, out of data under `join`, took part in another rank's backward."""
        ...

    def event(self, kind: str, **detail: wire.Scalar) -> None:
        """Record a single event, such as `buckets_rebuilt` or `comm_hook_set`."""
        ...

    def waiting_began(self) -> bool:
        """Record the start of a wait for buckets outside of backward (Horovod's). False if it is not recorded."""
        ...

    def waiting_ended(self) -> None:
        """Record the end of a wait for which `waiting_began` returned True."""
        ...

    @property
    def in_backward(self) -> bool:
        """Whether a call of torch's `backward` is in progress, so that `on_backward_end` will report its end."""
        ...

    def on_backward_end(self, callback: Callable[[], None], /) -> Callable[[], None]:
        """Call a function when the outermost backward returns. The result unregisters it."""
        ...
