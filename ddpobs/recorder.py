"""What a DDP module tells of its steps, and how stamps become the columns that travel.

`ModuleRecorder` is the face towards the reducer: stores into preallocated lists. `summarise` runs on the telemetry
thread and turns one `phases.RawStep` into times.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ddpobs import wire
from ddpobs.clocks import Clock, HostClock, Stamp, clock_for
from ddpobs.phases import BACKWARD, EXPOSED_COMM, OTHER, RawStep, Segment, StepTracker, harmless

Interval = tuple[int, int, int]
"""(begin_ns, end_ns, phase)"""


class Backward:
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
        last_bucket: The bucket launched last, for pulses; `wire.UNKNOWN` before the first.
    """

    def __init__(
        self,
        index: int,
        module: torch.nn.Module,
        tracker: StepTracker,
        *,
        name: str | None = None,
        clock: Clock,
        offer: Callable[[object], object],
        readiness_every: int,
    ) -> None:
        self.index = index
        self.now = clock.now
        self.current: Backward | None = None
        self._module = weakref.ref(module)
        self._name = name or _module_name(module)
        self._tracker = tracker
        self._offer = offer
        self._readiness_every = readiness_every
        self._revision = -1
        self._buckets = 0
        self._parameters = 0
        self._backwards = 0
        self._unused: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        tracker.modules += 1

    @harmless
    def layout(self, buckets: list[wire.Bucket], comm: str) -> None:
        """The module has new buckets, in launch order; `comm` names what is done with a full one."""
        self._revision += 1
        self._buckets = len(buckets)
        self._parameters = sum(len(bucket.parameters) for bucket in buckets)
        self._offer(
            wire.Layout(module=self.index, name=self._name, revision=self._revision, comm=comm, buckets=buckets)
        )

    def backward(self) -> Backward | None:
        """A fresh record for the synchronised backward that begins; each parameter's readiness is sampled.

        None where nothing may be recorded, in the capture of a CUDA graph.
        """
        if self._tracker.paused:
            return None
        sampled = self._backwards % self._readiness_every == 0
        self._backwards += 1
        self.current = Backward(self.index, self._revision, self._buckets, self._parameters if sampled else None)
        return self.current

    def finished(self, record: Backward) -> None:
        """Every bucket of that backward was waited for."""
        self._tracker.synchronised(self.index, record)

    def waiting_began(self) -> bool:
        """Training waits for buckets outside of backward; False where that is not noted."""
        return bool(self._tracker.waiting_began())

    def waiting_ended(self) -> None:
        """That wait is over."""
        self._tracker.waiting_ended()

    def shadowed(self) -> None:
        """Under `join` this rank, out of data, took part in a synchronised backward of the others."""
        self._tracker.shadowed()

    def on_backward_end(self, told: Callable[[], None]) -> Callable[[], None]:
        """Have `told` called when the outermost backward returns; the result takes that back."""
        listening = self._tracker.on_backward_end
        listening.append(told)
        return lambda: listening.remove(told) if told in listening else None

    def communicated(self, kind: str, launched_ns: Stamp, done_ns: Stamp) -> None:
        """Communication other than gradient buckets; `kind` is one of `wire.COMM_KINDS`."""
        self._tracker.communicated(self.index, wire.COMM_KINDS.index(kind), launched_ns, done_ns)

    @harmless
    def unused(self, locally: Iterable[str], globally: Iterable[str]) -> None:
        """Names of the parameters that the backward left out; travels when the set changes."""
        found = (tuple(locally), tuple(globally))
        if found != self._unused:
            self._unused = found
            self._offer(
                wire.Unused(
                    step=self._tracker.number, module=self.index, locally=list(found[0]), globally=list(found[1])
                )
            )

    @harmless
    def forward_began(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
        """The DDP module's forward was called with these inputs."""
        # One of several modules runs without gradients as part of a step, as a GAN's generator does for its
        # discriminator; the only one does so to evaluate.
        training = bool(self.training) and (torch.is_grad_enabled() or self._tracker.modules > 1)
        self._tracker.forward_began(self.index, training, _batch_size(*inputs, *(kwargs or {}).values()))

    @property
    def training(self) -> bool | None:
        """Whether the wrapped module is in training mode, the only mode that frameworks keep right; None once gone."""
        module = self._module()
        return None if module is None else bool(getattr(module, "module", module).training)

    @harmless
    def event(self, kind: str, **detail: wire.Scalar) -> None:
        """Something that happened once."""
        self._offer(
            wire.Event(kind=kind, at_ns=_host_ns(), step=self._tracker.number, detail={"module": self.index, **detail})
        )

    def launched_last(self) -> int:
        """The bucket handed to the process group last, in the backward recorded last."""
        launched = self.current.launched_ns if self.current else []
        return sum(1 for stamp in launched if stamp) - 1


class Span(NamedTuple):
    """One bucket's times, in ns of this process's monotonic clock."""

    module: int
    revision: int
    bucket: int
    ready_ns: int
    launched_ns: int
    started_ns: int
    done_ns: int


class Step(NamedTuple):
    """One step's times, ready to travel. `phases_ns` follow `wire.PHASES`, `own_phases_ns` too (its exposed is 0)."""

    number: int
    collective: int
    start_ns: int
    end_ns: int
    phases_ns: list[int]
    own_phases_ns: list[int] | None
    comm_ns: int
    micro_steps: int
    samples: int
    flags: int
    spans: list[Span]
    comms: list[tuple[int, int, int, int]]
    readiness: list[wire.Readiness]


class Summariser:
    """Turns raw steps into times, in order; carries what a step leaves for the next one's own time.

    Args:
        clock: What the stamps are of.
        resolution_ns: Times are multiples of it, rounded down: digits that mean nothing take most of the space.
    """

    def __init__(self, clock: Clock, resolution_ns: int = 1) -> None:
        self._at = _rounded(clock, resolution_ns)
        self._resolution_ns = resolution_ns
        self._origin_ns: int | None = None
        self._carried: list[Interval] = []

    def summarise(self, raw: RawStep) -> Step:
        """The step's phases, spans and own time.

        Phases: the tracker's switches, over which exposed communication is laid: from a backward's last readiness to
        its last completion, and every blocking collective. Own time: what was not exposed communication between the
        end of the last full synchronisation and the last readiness (domain: stragglers without a common clock).
        """
        at = self._at
        switches = [(phase, at(stamp)) for phase, stamp in raw.switches]
        end_ns = max(at(raw.end), switches[-1][1])
        comms = [(module, kind, at(begin), at(end)) for module, kind, begin, end in raw.comms]
        intervals = _intervals(switches, end_ns)
        for _, _, begin, end in comms:
            intervals = lay(intervals, begin, end, EXPOSED_COMM)
        spans: list[Span] = []
        windows: list[tuple[int, int, Segment]] = []
        for segment in raw.segments:
            returned_ns = at(segment.end)
            found = self._spans(segment, returned_ns)
            spans += found
            unseen = [at(record.last_ready) for record in segment.records if record.last_ready]
            ready_ns = max([span.ready_ns for span in found] + unseen, default=returned_ns)
            done_ns = max([span.done_ns for span in found] + [end for *_, end in comms if end >= ready_ns], default=0)
            done_ns = returned_ns if unseen else min(max(done_ns, ready_ns), returned_ns)
            if not segment.waited:
                intervals = _exposed_after(intervals, ready_ns, done_ns, returned_ns)
            windows.append((ready_ns, done_ns, segment))
        own, flags = self._own(intervals, windows)
        return Step(
            number=raw.number,
            collective=raw.segments[-1].collective if raw.segments else wire.UNKNOWN,
            start_ns=switches[0][1],
            end_ns=end_ns,
            phases_ns=_totals(intervals),
            own_phases_ns=own,
            comm_ns=_union([(s.launched_ns, s.done_ns) for s in spans] + [(b, e) for _, _, b, e in comms]),
            micro_steps=raw.micro_steps,
            samples=raw.samples,
            flags=flags | (wire.SYNCHRONISED if raw.segments else 0),
            spans=spans,
            comms=comms,
            readiness=self._readiness(raw),
        )

    def _spans(self, segment: Segment, end_ns: int) -> list[Span]:
        """Times that make sense: a completion seen late by its callback is cut at backward's return, `end_ns`."""
        at = self._at
        spans = []
        for record in segment.records:
            stamps = zip(record.ready_ns, record.launched_ns, record.done_ns, strict=True)
            for bucket, (was_ready, was_launched, was_done) in enumerate(stamps):
                launched = at(was_launched) if was_launched else end_ns
                ready = at(was_ready) if was_ready else launched
                ready = ready if ready < launched else launched
                done = at(was_done) if was_done else end_ns
                done = done if done < end_ns else end_ns
                done = done if done > launched else launched
                started = wire.UNKNOWN
                if bucket in record.works:
                    started = _started(record.works[bucket], launched, done)
                    started -= started % self._resolution_ns if started != wire.UNKNOWN else 0
                spans.append(Span(record.module, record.revision, bucket, ready, launched, started, done))
        return spans

    def _own(self, intervals: list[Interval], windows: list[tuple[int, int, Segment]]) -> tuple[list[int] | None, int]:
        own = [0] * len(wire.PHASES)
        clean = bool(windows)
        since = self._carried + intervals
        for ready_ns, done_ns, segment in windows:
            if self._origin_ns is None or not segment.clean:
                clean = False
            else:
                own = _totals(_cut(since, self._origin_ns, ready_ns), own)
            self._origin_ns = done_ns
        if self._origin_ns is not None:
            self._carried = _cut(since, self._origin_ns, 2**62)[-256:]
        own[EXPOSED_COMM] = 0
        return (own if clean else None), (0 if clean else wire.NO_ORIGIN)

    def _readiness(self, raw: RawStep) -> list[wire.Readiness]:
        return [
            wire.Readiness(
                step=raw.number,
                module=record.module,
                revision=record.revision,
                ready_ns=np.array([self._at(s) if s else wire.UNKNOWN for s in record.parameter_ready_ns], np.int64),
            )
            for segment in raw.segments
            for record in segment.records
            if record.parameter_ready_ns is not None
        ]


def _rounded(clock: Clock, resolution_ns: int) -> Callable[[Stamp], int]:
    """From stamps to nanoseconds, rounded down: the innermost of all that the telemetry thread does."""
    if type(clock) is HostClock:
        return lambda stamp: stamp - stamp % resolution_ns

    def at(stamp: Stamp) -> int:
        ns: int = clock.nanoseconds(stamp)
        return ns - ns % resolution_ns

    return at


def _started(work: Any, launched_ns: int, done_ns: int) -> int:
    """When the collective began moving: its end less its duration, which NCCL's works know (domain: bucket spans)."""
    try:
        return wire.UNKNOWN if work is None else max(launched_ns, done_ns - round(work._get_duration() * 1e6))
    except RuntimeError:
        return wire.UNKNOWN


def lay(intervals: list[Interval], begin_ns: int, end_ns: int, phase: int) -> list[Interval]:
    """The intervals with `phase` laid over [begin_ns, end_ns]; the total length stays."""
    laid: list[Interval] = []
    for begin, end, under in intervals:
        low, high = max(begin, begin_ns), min(end, end_ns)
        if low >= high:
            laid.append((begin, end, under))
            continue
        pieces = [(begin, low, under), (low, high, phase), (high, end, under)]
        laid += [piece for piece in pieces if piece[0] < piece[1]]
    return laid


def _exposed_after(intervals: list[Interval], ready_ns: int, done_ns: int, end_ns: int) -> list[Interval]:
    """Split the rest of backward after the last gradient: exposed until done, then other."""
    split: list[Interval] = []
    for begin, end, phase in intervals:
        if phase != BACKWARD or end <= ready_ns or begin >= end_ns:
            split.append((begin, end, phase))
            continue
        pieces = [
            (begin, min(end, ready_ns), BACKWARD),
            (max(begin, ready_ns), min(end, done_ns), EXPOSED_COMM),
            (max(begin, done_ns), end, OTHER),
        ]
        split += [piece for piece in pieces if piece[0] < piece[1]]
    return split


def _intervals(switches: list[tuple[int, int]], end_ns: int) -> list[Interval]:
    ends = [at for _, at in switches[1:]] + [end_ns]
    return [(begin, end, phase) for (phase, begin), end in zip(switches, ends, strict=True) if begin < end]


def _cut(intervals: list[Interval], begin_ns: int, end_ns: int) -> list[Interval]:
    if begin_ns >= end_ns:
        return []
    return [
        (begin if begin > begin_ns else begin_ns, end if end < end_ns else end_ns, phase)
        for begin, end, phase in intervals
        if begin < end_ns and end > begin_ns
    ]


def _totals(intervals: list[Interval], totals: Sequence[int] = (0,) * len(wire.PHASES)) -> list[int]:
    """Time by phase, added to `totals`."""
    added = list(totals)
    for begin, end, phase in intervals:
        added[phase] += end - begin
    return added


def _union(intervals: list[tuple[int, int]]) -> int:
    total, reached = 0, 0
    for begin, end in sorted(intervals):
        if end > reached:
            total += end - (begin if begin > reached else reached)
            reached = end
    return total


def _batch_size(*inputs: Any) -> int:
    """Rows of the first tensor that has any, looked for in order and inside of containers."""
    for value in inputs:
        rows = 0
        if isinstance(value, torch.Tensor):
            rows = int(value.shape[0]) if value.ndim else 0
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
