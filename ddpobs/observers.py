"""The contract between training and telemetry: what a door reports about one module, split by what it is for.

A DDP module has one `ModuleObserver` from `ddpobs.telemetry.join`, or None while telemetry is off. `BackwardObserver`
takes the steps and their buckets, `ReplicaObserver` compares the replicas, and `PlaceObserver` keeps where the process
is, for the case that it hangs. `recording/module_recorder.py` implements all three. The doors (such as `attachment`
and `horovod`) and the reducer import nothing of that package. A door reports the calls that it has: a training without
buckets calls neither `layout` nor `bucket_launched`.

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

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

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
        waited_from_ns: Per bucket: training began to wait for its communication, which lasts until it is done; 0
            without a wait. None if training waits once, after the last gradient.
        last_bucket: One element, the index of the bucket launched last: a part of the process's place.
    """

    ready_ns: list[Stamp]
    launched_ns: list[Stamp]
    done_ns: list[Stamp]
    parameter_ready_ns: list[Stamp] | None
    works: dict[int, Any]
    last_ready: Stamp
    waited_from_ns: list[Stamp] | None
    last_bucket: memoryview[int]


class OwnWait(Protocol):
    """Takes the waits for collectives that a door itself launches by torch's public functions."""

    def wait_began(self) -> None:
        """Training begins to wait."""
        ...

    def wait_ended(self) -> None:
        """The collective is done, or an error ended the wait."""
        ...


class _Unrecorded:
    def wait_began(self) -> None:
        pass

    def wait_ended(self) -> None:
        pass


UNRECORDED: OwnWait = _Unrecorded()
"""Takes the waits for collectives that a door stamps where it launches them: they cost no call of telemetry."""


class OwnWaits(Protocol):
    """The waits of the process.

    Attributes:
        own: Takes the waits for collectives while they are a door's own, none of which is recorded as the user's; None
            while they are the user's.
    """

    own: OwnWait | None


class GradientSource(Protocol):
    """Follows the gradients of one module.

    Attributes:
        forwards: Forwards of the DDP module with gradients so far.
    """

    forwards: int

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """The parameters that are reduced."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """Their names."""
        ...

    @property
    def unreduced_parameters(self) -> Sequence[tuple[str, torch.nn.Parameter]]:
        """Names and parameters that are not reduced even if they require gradients later."""
        ...

    def has_local_gradients(self) -> bool:
        """Whether a gradient arrived since the last reduction, and none is about to be reduced. Cheap."""
        ...

    def local_gradients(self) -> list[int]:
        """Indices of the parameters whose gradient did."""
        ...


class BackwardObserver(Protocol):
    """Receives the steps of one module: its forwards, backwards, buckets and other communication."""

    @property
    def now(self) -> Callable[[], Stamp]:
        """Take a stamp: nanoseconds of `time.monotonic_ns` on the host, an event of the current stream on CUDA."""
        ...

    @property
    def waits(self) -> OwnWaits:
        """The waits of the process. A door that launches collectives claims them around each launch."""
        ...

    def layout(self, buckets: list[wire.Bucket], comm: str) -> None:
        """Record new buckets, in launch order, and the strategy that reduces them. The revision counts up by itself."""
        ...

    def forward_began(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
        """Record that the module's forward was called with these inputs."""
        ...

    def backward(self, counted: bool = False) -> BackwardStamps | None:
        """Open the record of the synchronised backward that begins.

        None if nothing may be recorded, as while a CUDA graph is captured.

        Args:
            counted: `PlaceObserver.reduction_began` was called for this backward.
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

    def shadowed(self, counted: bool = False) -> None:
        """Record that this rank, out of data under `join`, took part in another rank's backward; see `backward`."""
        ...

    def event(self, kind: str, **detail: wire.Scalar) -> None:
        """Record a single event, such as `buckets_rebuilt` or `comm_hook_set`."""
        ...

    @property
    def in_backward(self) -> bool:
        """Whether a call of torch's `backward` is in progress, so that `on_backward_end` will report its end."""
        ...

    def on_backward_end(self, callback: Callable[[bool], None], /) -> Callable[[], None]:
        """Call a function when a backward ends, with whether it raised. The result unregisters it."""
        ...


class ReplicaObserver(Protocol):
    """Compares the replicas of one module over the ranks."""

    def compare_replicas(
        self, parameters: Sequence[torch.nn.Parameter], names: Sequence[str], ranks: Sequence[int] | None = None
    ) -> None:
        """Sample fingerprints of these parameters from now on; both lists may grow.

        Args:
            parameters: The parameters.
            names: Their names.
            ranks: Ranks that hold the same shards of the parameters, which are DTensors; None for whole parameters.
        """
        ...

    @property
    def waits_for_forward(self) -> bool:
        """Whether `replicas_ready` is to be called in the next forward with gradients."""
        ...

    def replicas_ready(self, buffers: Iterable[tuple[str, torch.Tensor]] = ()) -> None:
        """Sample the parameters after an optimizer's step, and the buffers that were just made the same on all ranks.

        Called in a forward.
        """
        ...

    def follow_gradients(self, source: GradientSource) -> None:
        """Report optimizer steps on gradients of this source that were never reduced."""
        ...


class PlaceObserver(Protocol):
    """Keeps where the process is, which another process reads if this one hangs."""

    def reduction_began(self, launched_ns: list[Stamp], done_ns: list[Stamp]) -> None:
        """Count a synchronised backward, and follow its buckets: stamps of launch and completion, 0 until then."""
        ...

    def bucket_launched(self, bucket: int) -> None:
        """Keep the bucket launched last, `wire.UNKNOWN` at the begin of a backward."""
        ...

    def buffers_began(self) -> Stamp:
        """Count the broadcast of buffers that begins, and return its stamp."""
        ...

    def waiting_began(self, phase: str = "exposed_comm") -> bool:
        """Record the start of a call outside of backward in which training waits for buckets. False if not recorded.

        Args:
            phase: The call's own phase. Beside `exposed_comm`, the waits for its collectives are exposed communication.
        """
        ...

    def waiting_ended(self) -> None:
        """Record the end of a call for which `waiting_began` returned True."""
        ...


class ModuleObserver(BackwardObserver, ReplicaObserver, PlaceObserver, Protocol):
    """Receives all that a door reports about one module."""
