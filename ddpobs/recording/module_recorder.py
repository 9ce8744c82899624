"""Recorder of one DDP module, called by the reducer: stores into preallocated lists."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddpobs import wire
from ddpobs.clocks import Clock, Stamp, clock_for
from ddpobs.never_raises import never_raises
from ddpobs.observers import GradientSource, OwnWaits
from ddpobs.recording.input_size import input_size
from ddpobs.recording.journal import Journal
from ddpobs.recording.place.place_file import Slot
from ddpobs.recording.replicas.fingerprints import Fingerprints, local_shard
from ddpobs.recording.replicas.unreduced import UnreducedGradients
from ddpobs.recording.unused_names import UnusedNames
from ddpobs.steps.backward_record import BackwardRecord
from ddpobs.torch_seam.modes import unseen

_MODULE, _BUCKET = int(Slot.MODULE), int(Slot.BUCKET)
"""Plain numbers, because a member of an enumeration is slow as an index."""
_LOCAL_STRATEGIES = ("post_localSGD_hook",)
"""Communication hooks that let the replicas part on purpose."""


class ModuleRecorder:
    """Records one DDP module's steps for the telemetry of its process.

    Attributes:
        index: Number of the module in this process.
        now: Takes a stamp; `time.monotonic_ns` on the host.
        current: Record of the latest synchronised backward.
        synchronised: A backward was synchronised, also if it was not recorded.
        fingerprints: Samples the module's replicas; None if they are not compared.
        waits: The waits of the process.
        unused_names: Sends the names of parameters that a backward left out.
    """

    def __init__(
        self,
        index: int,
        module: torch.nn.Module,
        journal: Journal,
        *,
        name: str | None = None,
        clock: Clock,
        offer: Callable[[object], object],
        readiness_every: int,
        fingerprint_every: int = 0,
        unreduced: UnreducedGradients | None = None,
    ) -> None:
        self.index = index
        self.synchronised = False
        self._fingerprint_every = fingerprint_every
        self.fingerprints: Fingerprints | None = None
        self._unreduced = unreduced
        self.now = clock.now
        self._is_done = clock.is_ready
        self.current: BackwardRecord | None = None
        self._reducing: tuple[list[Stamp], list[Stamp]] = ([], [])
        """Launch and completion of each bucket in the latest synchronised backward."""
        self._module = weakref.ref(module)
        self._wrapped = weakref.ref(_wrapped(module))
        """Read by the telemetry thread: it must not hold the DDP module, or that would end on this thread and late."""
        self._name = name or _module_name(module)
        self._journal = journal
        self.waits: OwnWaits = journal.waits
        self._offer = offer
        self._readiness_every = readiness_every
        self._revision = -1
        self._layout: list[wire.Bucket] = []
        self._parameters = 0
        self._backwards = 0
        self.unused_names = UnusedNames(index, offer)
        journal.modules += 1

    @never_raises
    def layout(self, buckets: list[wire.Bucket], comm: str) -> None:
        """Record the module's new buckets, in launch order, and the name of the communication strategy."""
        if comm in _LOCAL_STRATEGIES:
            self.fingerprints, self._fingerprint_every = None, 0
        self._revision += 1
        self._layout = buckets
        self._parameters = sum(len(bucket.parameters) for bucket in buckets)
        self._offer(
            wire.Layout(module=self.index, name=self._name, revision=self._revision, comm=comm, buckets=buckets)
        )

    def reduction_began(self, launched_ns: list[Stamp], done_ns: list[Stamp]) -> None:
        """Count a synchronised backward, and follow its buckets: stamps of launch and completion, 0 until then."""
        self._reducing = launched_ns, done_ns
        self._journal.synchronised += 1

    def bucket(self, index: int) -> wire.Bucket | None:
        """A bucket of the latest layout; None for a bucket that it does not have."""
        layout = self._layout
        return layout[index] if 0 <= index < len(layout) else None

    def backward(self, counted: bool = False) -> BackwardRecord | None:
        """Return a new record for the synchronised backward that begins.

        Some records sample the readiness of each parameter, if the module has a layout. None during the capture of a
        CUDA graph, in which nothing may be recorded.

        Args:
            counted: `reduction_began` was called for this backward.
        """
        self._count_backward()
        self._journal.resting.backward_began()
        if self._journal.thread.paused:
            return None
        sampled = bool(self._layout) and self._backwards % self._readiness_every == 0
        self._backwards += 1
        self.current = BackwardRecord(
            self.index, self._revision, len(self._layout), self._parameters if sampled else None
        )
        if not counted:
            self.reduction_began(self.current.launched_ns, self.current.done_ns)
        self.current.last_bucket = self._journal.place.last_bucket
        self.bucket_launched(wire.UNKNOWN)
        return self.current

    def bucket_launched(self, bucket: int) -> None:
        """Store the bucket launched last into the process's place, `wire.UNKNOWN` at the begin of a backward."""
        slots = self._journal.place.slots
        slots[_MODULE], slots[_BUCKET] = self.index, bucket

    def finished(self, record: BackwardRecord) -> None:
        """Record the end of a backward: all waits for its buckets are over."""
        self._journal.gradients_reduced(self.index, record)
        if self.fingerprints is not None and self.fingerprints.is_due:
            self._sample_gradients(self.fingerprints)

    def _count_backward(self) -> None:
        self.synchronised = True
        if self.fingerprints is not None:
            self.fingerprints.backward_began()

    @never_raises
    def compare_replicas(
        self, parameters: Sequence[torch.nn.Parameter], names: Sequence[str], ranks: Sequence[int] | None = None
    ) -> None:
        """Sample fingerprints of these parameters from now on; both lists may grow.

        Args:
            parameters: The parameters.
            names: Their names.
            ranks: Ranks that hold the same shards of the parameters, which are DTensors; None for whole parameters.
        """
        if not self._fingerprint_every:
            return
        every, world_size = self._fingerprint_every, dist.get_world_size()
        if ranks is None:
            self.fingerprints = Fingerprints(every, parameters, names, self._offer, self.index)
        else:
            number = wire.replicas_module(self.index, min(ranks), world_size)
            if number <= wire.MAX_INDEX:
                self.fingerprints = Fingerprints(every, parameters, names, self._offer, number, part=local_shard)

    @never_raises
    @unseen
    def _sample_gradients(self, fingerprints: Fingerprints) -> None:
        if not self._journal.thread.paused:
            fingerprints.reduced()

    @property
    def waits_for_forward(self) -> bool:
        """Whether `replicas_ready` is to be called in the next forward with gradients."""
        return self.fingerprints is not None and self.fingerprints.waits_for_forward

    @never_raises
    @unseen
    def replicas_ready(self, buffers: Iterable[tuple[str, torch.Tensor]] = ()) -> None:
        """Sample the parameters after an optimizer's step, and the buffers that were just made the same on all ranks.

        Called in a forward. One without gradients may run on one rank alone, perhaps with averaged parameters.
        """
        if self.fingerprints is not None and torch.is_grad_enabled() and not self._journal.thread.paused:
            self.fingerprints.forward_began(buffers)

    def follow_gradients(self, source: GradientSource) -> None:
        """Report optimizer steps on this module's gradients that were not reduced."""
        if self._unreduced is not None:
            self._unreduced.follow(self.index, source, lambda: self.synchronised, self._exchanged)

    @never_raises
    @unseen
    def _exchanged(self) -> None:
        if self.fingerprints is not None and not self._journal.thread.paused:
            self.fingerprints.exchanged()

    def waiting_began(self, phase: str = "exposed_comm") -> bool:
        """Record that training waits for buckets in a call outside of backward; False if it is not recorded."""
        return bool(self._journal.waiting_began(wire.PHASES.index(phase)))

    def waiting_ended(self) -> None:
        """Record the end of that wait."""
        self._journal.waiting_ended()

    def shadowed(self, counted: bool = False) -> None:
        """Record that this rank, out of data under `join`, took part in a synchronised backward of other ranks.

        Args:
            counted: `reduction_began` was called for this backward.
        """
        if not counted:
            self.reduction_began([], [])
        self._count_backward()
        self._journal.resting.backward_began(has_data=False)
        self._journal.zeros_contributed()

    def buffers_began(self) -> Stamp:
        """Count the broadcast of the module's buffers that begins, and return its stamp."""
        self._journal.buffer_broadcasts += 1
        return self.now()

    def on_backward_end(self, callback: Callable[[bool], None]) -> Callable[[], None]:
        """Call `callback` whenever a backward ends, with whether it raised; the result removes it."""
        callbacks = self._journal.on_backward_end
        callbacks.append(callback)
        return lambda: callbacks.remove(callback) if callback in callbacks else None

    @property
    def in_backward(self) -> bool:
        """Whether a backward is under way, begun by torch's function: its end calls `on_backward_end`."""
        return self._journal.thread.in_backward

    def communicated(self, kind: str, launched_ns: Stamp, done_ns: Stamp) -> None:
        """Record communication other than gradient buckets; `kind` is one of `wire.COMM_KINDS`."""
        self._journal.waits.comm_ended(self.index, wire.COMM_KINDS.index(kind), launched_ns, done_ns)

    @never_raises
    def unused(self, locally: Iterable[str], globally: Iterable[str]) -> None:
        """Record the names of the parameters that the backward left out."""
        self.unused_names.record(self._journal.number, tuple(locally), tuple(globally))

    def forward_began(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
        """Record a call of the DDP module's forward with these inputs."""
        journal = self._journal
        try:
            if (module := self._module()) is not None and (wrapped := _wrapped(module)) is not self._wrapped():
                self._wrapped = weakref.ref(wrapped)
            # If several modules are trained, one may run without gradients as part of a step, as a GAN's generator for
            # its discriminator. A single module only does so to evaluate.
            if self.training:
                training = torch.is_grad_enabled() or (len(journal.trained) > 1 and self.index in journal.trained)
            else:
                training = journal.evaluation.trains and torch.is_grad_enabled()
            size = input_size(*inputs, *kwargs.values()) if kwargs else input_size(*inputs)
            journal.forward_began(self.index, training, size)
        except Exception:
            journal.entries.log_failure(ModuleRecorder.forward_began)

    @property
    def training(self) -> bool | None:
        """Whether the wrapped module is in training mode; None once it is collected.

        Frameworks do not keep the wrapper's own mode right.
        """
        wrapped = self._wrapped()
        return None if wrapped is None else bool(wrapped.training)

    @never_raises
    def event(self, kind: str, **detail: wire.Scalar) -> None:
        """Record an event of this module."""
        self._offer(
            wire.Event(kind=kind, at_ns=_host_ns(), step=self._journal.number, detail={"module": self.index, **detail})
        )

    @property
    def reduces(self) -> bool:
        """Whether a synchronised backward was recorded."""
        return bool(self._reducing[0])

    def pending_bucket(self) -> int:
        """Index of the first bucket that was launched and is not done; `wire.UNKNOWN` if there is none."""
        for index, (launched, done) in enumerate(zip(*self._reducing, strict=True)):
            if launched and not (done and self._is_done(done)):
                return index
        return wire.UNKNOWN

    def launched_last(self) -> int:
        """Index of the bucket last handed to the process group, in the latest recorded backward."""
        return max((i for i, stamp in enumerate(self._reducing[0]) if stamp), default=wire.UNKNOWN)


def _wrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside a DDP module; another module, as Horovod's, is returned itself."""
    return module._modules.get("module", module)  # type: ignore[return-value]


def _module_name(module: torch.nn.Module) -> str:
    return type(getattr(module, "module", module)).__name__


def _host_ns() -> int:
    return clock_for("cpu").now()  # type: ignore[no-any-return]
