"""What a DDP module tells of its steps: the face towards the reducer, stores into preallocated lists."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ddpobs import wire
from ddpobs.clocks import Clock, Stamp, clock_for
from ddpobs.recording.journal import Journal, never_raises

_NAMES_A_BATCH = 2_000


class BackwardRecord:
    """Stamps of one synchronised backward of one module; a list per event, one place per bucket.

    `works` are collectives that know how long they were moving; empty where the backend does not tell. `last_ready` is
    when the last gradient came, told where buckets cannot be seen.
    """

    __slots__ = (
        "done_ns",
        "last_ready",
        "launched_ns",
        "module",
        "parameter_ready_ns",
        "ready_ns",
        "revision",
        "works",
    )

    def __init__(self, module: int, revision: int, buckets: int, parameters: int | None) -> None:
        self.module = module
        self.revision = revision
        self.ready_ns: list[Stamp] = [0] * buckets
        self.launched_ns: list[Stamp] = [0] * buckets
        self.done_ns: list[Stamp] = [0] * buckets
        self.works: dict[int, Any] = {}
        self.last_ready: Stamp = 0
        self.parameter_ready_ns: list[Stamp] | None = None if parameters is None else [0] * parameters


class ModuleRecorder:
    """One DDP module's part of the process's telemetry.

    Attributes:
        index: The module's number in this process.
        now: Takes a stamp; `time.monotonic_ns` on the host.
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
    ) -> None:
        self.index = index
        self.now = clock.now
        self.current: BackwardRecord | None = None
        self._module = weakref.ref(module)
        self._name = name or _module_name(module)
        self._journal = journal
        self._offer = offer
        self._readiness_every = readiness_every
        self._revision = -1
        self._buckets = 0
        self._parameters = 0
        self._backwards = 0
        self._unused: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._names_told = 0
        self._waiting: wire.Unused | None = None
        self._telling = threading.Lock()
        journal.modules += 1

    @never_raises
    def layout(self, buckets: list[wire.Bucket], comm: str) -> None:
        """The module has new buckets, in launch order; `comm` names what is done with a full one."""
        self._revision += 1
        self._buckets = len(buckets)
        self._parameters = sum(len(bucket.parameters) for bucket in buckets)
        self._offer(
            wire.Layout(module=self.index, name=self._name, revision=self._revision, comm=comm, buckets=buckets)
        )

    def backward(self) -> BackwardRecord | None:
        """A fresh record for the synchronised backward that begins; each parameter's readiness is sampled.

        None where nothing may be recorded, in the capture of a CUDA graph.
        """
        if self._journal.paused:
            return None
        sampled = self._backwards % self._readiness_every == 0
        self._backwards += 1
        self.current = BackwardRecord(self.index, self._revision, self._buckets, self._parameters if sampled else None)
        return self.current

    def finished(self, record: BackwardRecord) -> None:
        """Every bucket of that backward was waited for."""
        self._journal.synchronised(self.index, record)

    def waiting_began(self) -> bool:
        """Training waits for buckets outside of backward; False where that is not noted."""
        return bool(self._journal.waiting_began())

    def waiting_ended(self) -> None:
        """That wait is over."""
        self._journal.waiting_ended()

    def shadowed(self) -> None:
        """Under `join` this rank, out of data, took part in a synchronised backward of the others."""
        self._journal.shadowed()

    def on_backward_end(self, told: Callable[[], None]) -> Callable[[], None]:
        """Have `told` called when the outermost backward returns; the result takes that back."""
        listening = self._journal.on_backward_end
        listening.append(told)
        return lambda: listening.remove(told) if told in listening else None

    @property
    def in_backward(self) -> bool:
        """Whether a backward is under way of whose end `on_backward_end` tells: torch's function was called for it."""
        return self._journal.in_backward

    def communicated(self, kind: str, launched_ns: Stamp, done_ns: Stamp) -> None:
        """Communication other than gradient buckets; `kind` is one of `wire.COMM_KINDS`."""
        self._journal.communicated(self.index, wire.COMM_KINDS.index(kind), launched_ns, done_ns)

    @never_raises
    def unused(self, locally: Iterable[str], globally: Iterable[str]) -> None:
        """Names of the parameters that the backward left out; travels when the set changes.

        Where it changes all the time (experts, layers that are dropped) a batch would be made of names, and be refused:
        of those beyond `_NAMES_A_BATCH` only the latest set travels, with the next batch.
        """
        found = (tuple(locally), tuple(globally))
        if found == self._unused:
            return
        self._unused = found
        told = wire.Unused(
            step=self._journal.number, module=self.index, locally=list(found[0]), globally=list(found[1])
        )
        with self._telling:
            self._waiting = None
            if self._names_told < _NAMES_A_BATCH:
                self._tell(told)
            else:
                self._waiting = told

    def batch_cut(self) -> None:
        """What was told so far is in a batch; called on the telemetry thread."""
        with self._telling:
            self._names_told = 0
            waiting, self._waiting = self._waiting, None
            if waiting is not None:
                self._tell(waiting)

    def _tell(self, unused: wire.Unused) -> None:
        self._names_told += len(unused.locally) + len(unused.globally)
        self._offer(unused)

    def forward_began(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
        """The DDP module's forward was called with these inputs."""
        journal = self._journal
        try:
            # One of several that are trained runs without gradients as part of a step, as a GAN's generator does for
            # its discriminator; the only one does so to evaluate.
            if self.training:
                training = torch.is_grad_enabled() or (len(journal.trained) > 1 and self.index in journal.trained)
            else:
                training = journal.trains_in_eval and torch.is_grad_enabled()
            try:
                samples = _batch_size(*inputs, *kwargs.values()) if kwargs else _batch_size(*inputs)
            except Exception:  # A tensor subclass may have no such size.
                samples = 0
            journal.forward_began(self.index, training, samples)
        except Exception:
            journal.failed(ModuleRecorder.forward_began)

    @property
    def training(self) -> bool | None:
        """Whether the wrapped module is in training mode, the only mode that frameworks keep right; None once gone."""
        module = self._module()
        return None if module is None else bool(module._modules.get("module", module).training)  # type: ignore[union-attr]

    @never_raises
    def event(self, kind: str, **detail: wire.Scalar) -> None:
        """Something that happened once."""
        self._offer(
            wire.Event(kind=kind, at_ns=_host_ns(), step=self._journal.number, detail={"module": self.index, **detail})
        )

    def launched_last(self) -> int:
        """The bucket handed to the process group last, in the backward recorded last."""
        launched = self.current.launched_ns if self.current else []
        return sum(1 for stamp in launched if stamp) - 1


def _batch_size(*inputs: Any) -> int:
    """Rows of the first tensor that has any, looked for in order and inside of containers."""
    for value in inputs:
        rows = 0
        if isinstance(value, torch.Tensor):
            rows = int(value.size(0)) if value.dim() else 0  # Nested ones have no shape.
        elif isinstance(value, Mapping):
            rows = _batch_size(*value.values())
        elif isinstance(value, (list, tuple)):
            rows = _batch_size(*value)
        if rows:
            return rows
    return 0


def _module_name(module: torch.nn.Module) -> str:
    return type(getattr(module, "module", module)).__name__


def _host_ns() -> int:
    return clock_for("cpu").now()  # type: ignore[no-any-return]
