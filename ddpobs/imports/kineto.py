"""Traces of torch.profiler (Kineto): one file of each rank, of a training with DDP or with fully sharded modules.

What is read, by the category that Kineto gives an event:

| category | what it tells |
|---|---|
| `user_annotation` | steps, batches, forwards, optimizer steps; gloo's collectives, on threads of their own |
| `cpu_op` | backward, by the engine's functions; launches of collectives; computation on a processor |
| `kernel`, `gpu_memcpy`, `gpu_memset` | computation on a GPU; collectives of NCCL |
| `cuda_runtime`, `cuda_driver` | when the host launched them, by their correlation |

A phase on a GPU ends when the device has done the work that was launched in it, as an event on its stream tells a live
run. On a CPU a phase ends with its call.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from ddpobs.errors import TraceFileError
from ddpobs.imports.rank_trace import Call, CallKind, Collective, RankTrace, union
from ddpobs.imports.trace_events import TraceEvents
from ddpobs.wire import Ints

_ENGINE = "autograd::engine::evaluate_function"
_COPY = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
_LAUNCH = "c10d::"
_NOT_COLLECTIVE = ("c10d::monitored_barrier_", "c10d::send", "c10d::recv_", "c10d::recv_any_source_")
_GLOO = "gloo:"
_NCCL = "nccl"
_FORWARDS = ("DistributedDataParallel.forward", "FSDP::root_pre_forward")
_FETCH, _STEP, _OPTIMIZER, _ZERO = "enumerate(DataLoader)#", "ProfilerStep#", "Optimizer.step#", "Optimizer.zero_grad#"
_COMPUTED = "aten::"
_BYTES = {"Float": 4, "Half": 2, "BFloat16": 2, "Double": 8, "Int": 4, "Long": 8, "Byte": 1, "Char": 1, "Bool": 1}
_LONGEST_UNION = 2**20
"""Intervals of computation after which they are joined."""


class _Args(msgspec.Struct, frozen=True, gc=False):
    """Arguments of an event that matter."""

    correlation: int = 0
    collective: str = msgspec.field(default="", name="Collective name")
    elements: int = msgspec.field(default=0, name="In msg nelems")
    dtype: str = ""


_NONE = _Args()
_Microseconds = Annotated[float, msgspec.Meta(ge=-4e15, le=4e15)]
"""In nanoseconds, 64 bits hold it."""


class _Event(msgspec.Struct, frozen=True, gc=False):
    """One event. Times are in microseconds."""

    name: str = ""
    ph: str = ""
    cat: str = ""
    ts: _Microseconds = 0.0
    dur: _Microseconds = 0.0
    args: _Args = _NONE


class _Group(msgspec.Struct):
    backend: str = ""
    rank: int | None = None
    world_size: int | None = None


class _Device(msgspec.Struct):
    name: str = ""


class _Reader:
    """Collects the events of one file."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.calls: list[Call] = []
        self.engine: list[tuple[int, int]] = []
        self.zeroed: list[int] = []
        self.launches: list[tuple[int, int, str]] = []
        self.gloo: list[tuple[int, int, str]] = []
        self.nccl: list[tuple[int, int, int, _Args, str]] = []
        self.computing: dict[bool, array[float]] = {False: array("d"), True: array("d")}
        """Begin and duration of computation on the host, and on a GPU, in microseconds."""
        self.kernels = array("d")
        """Correlation, begin and duration of kernels and copies."""
        self.runtime = array("d")
        """Correlation and begin of the calls that launched them."""
        self._computed: dict[bool, Ints] = dict.fromkeys((False, True), np.zeros((0, 2), np.int64))
        self._by_category: dict[str, Callable[[_Event], None]] = {
            "user_annotation": self._annotation,
            "cpu_op": self._operator,
            "kernel": self._kernel,
            "gpu_memcpy": self._kernel,
            "gpu_memset": self._kernel,
            "cuda_runtime": self._launched,
            "cuda_driver": self._launched,
        }

    def add(self, events: list[_Event]) -> None:
        """Add a piece of the file."""
        for event in events:
            if event.ph == "X" and (take := self._by_category.get(event.cat)) is not None:
                take(event)
        for on_gpu, pairs in self.computing.items():
            if len(pairs) > 2 * _LONGEST_UNION:
                self._computed[on_gpu], self.computing[on_gpu] = self.computation(on_gpu), array("d")

    def computation(self, on_gpu: bool) -> Ints:
        """Begin and end of the computation so far."""
        new = _intervals(np.frombuffer(self.computing[on_gpu]).reshape(-1, 2))
        return union(np.concatenate([self._computed[on_gpu], new]))

    def _annotation(self, event: _Event) -> None:
        name = event.name
        began, ended = _times(event)
        if name.startswith(_STEP) and name[len(_STEP) :].isdecimal():
            self.steps.append((int(name[len(_STEP) :]), began))
        elif name in _FORWARDS:
            self.calls.append(Call("forward", began, ended))
        elif name.startswith(_FETCH):
            self.calls.append(Call("fetch", began, ended))
        elif name.startswith(_OPTIMIZER):
            self.calls.append(Call("optimizer", began, ended))
        elif name.startswith(_ZERO):
            self.zeroed.append(ended)
        elif name.startswith(_GLOO):
            self.gloo.append((began, ended, name[len(_GLOO) :]))

    def _operator(self, event: _Event) -> None:
        name = event.name
        if name.startswith(_COMPUTED):
            self.computing[False].extend((event.ts, event.dur))
        elif name.startswith(_ENGINE) or name == _COPY:  # The copy ends a backward.
            self.engine.append(_times(event))
        elif name.startswith(_LAUNCH):
            if name not in _NOT_COLLECTIVE:
                self.launches.append((*_times(event), name[len(_LAUNCH) :].strip("_")))
        elif name in _FORWARDS:
            self.calls.append(Call("forward", *_times(event)))

    def _kernel(self, event: _Event) -> None:
        if event.name.startswith(_NCCL):
            self.nccl.append((event.args.correlation, *_times(event), event.args, event.name))
            return
        self.kernels.extend((event.args.correlation, event.ts, event.dur))
        if event.cat == "kernel":
            self.computing[True].extend((event.ts, event.dur))

    def _launched(self, event: _Event) -> None:
        self.runtime.extend((event.args.correlation, event.ts))


def read(path: Path, advance: Callable[[int], object] = lambda _: None) -> RankTrace:
    """Read the trace of one rank.

    Args:
        path: File of `torch.profiler.profile.export_chrome_trace`, plain or gzip.
        advance: Is called with the number of further bytes that were read.

    Raises:
        TraceFileError: The file is no such trace, is cut off, or has no step.
    """
    events, reader = TraceEvents(path, _Event, advance), _Reader()
    for piece in events.pieces():
        reader.add(piece)
    header = events.header
    group = _field(path, header, "distributedInfo", _Group) or _Group()
    devices = _field(path, header, "deviceProperties", list[_Device]) or []
    on_gpu = len(reader.kernels) > 0
    trace = RankTrace(
        source=path.name,
        rank=group.rank,
        world_size=group.world_size,
        host=_field(path, header, "host_name", str) or "",
        backend=group.backend or ("nccl" if on_gpu else "gloo"),
        device=devices[0].name if on_gpu and devices else "cuda" if on_gpu else "cpu",
        wall_ns=_field(path, header, "baseTimeNanoseconds", int) or 0,
        steps=sorted(reader.steps),
        calls=_calls(reader),
        collectives=_nccl(reader) if on_gpu else _of_gloo(reader),
        computing_ns=reader.computation(on_gpu),
        device_ns=_device_times(reader),
    )
    if not any(call.kind == "backward" for call in trace.calls):
        raise TraceFileError(path, "a trace of a training, with at least one backward", f"{len(trace.calls)} calls")
    return trace


def _calls(reader: _Reader) -> list[Call]:
    """The calls in order, with each backward, and a forward before it where the trace names none."""
    calls = sorted(reader.calls, key=lambda call: call.began_ns)
    edges = sorted([*(call.began_ns for call in calls), *(began for _, began in reader.steps)])
    backwards = _backwards(sorted(reader.engine), edges)
    if not any(call.kind == "forward" for call in calls):
        starts = sorted(
            [*(began for _, began in reader.steps), *(c.ended_ns for c in calls if c.kind == "fetch"), *reader.zeroed]
        )
        for backward in backwards:
            before = [at_ns for at_ns in starts if at_ns < backward.began_ns]
            began = before[-1] if before else backward.began_ns
            calls.append(Call("forward", began, backward.began_ns))
    return sorted([*calls, *backwards], key=lambda call: call.began_ns)


def _backwards(engine: list[tuple[int, int]], edges: list[int]) -> list[Call]:
    """Join the engine's functions that no other call of the training thread separates."""
    backwards: list[list[int]] = []
    gaps = np.searchsorted(edges, [began for began, _ in engine])
    last = None
    for (began, ended), gap in zip(engine, gaps.tolist(), strict=True):
        if gap != last:
            backwards.append([began, ended])
        backwards[-1][1] = max(backwards[-1][1], ended)
        last = gap
    kind: CallKind = "backward"
    return [Call(kind, began, ended) for began, ended in backwards]


def _of_gloo(reader: _Reader) -> list[Collective]:
    """Join gloo's works with their launches: it begins them in the order of the launches."""
    launches = sorted(reader.launches)
    collectives, at = [], 0
    for began, ended, name in sorted(reader.gloo):
        if at < len(launches) and launches[at][0] <= began:
            launched, at = launches[at][0], at + 1
        else:
            launched = began
        collectives.append(Collective(name, launched, began, max(began, ended)))
    return sorted(collectives, key=lambda one: one.launched_ns)


def _nccl(reader: _Reader) -> list[Collective]:
    launched = _launch_times(reader)
    collectives = []
    for correlation, began, ended, args, name in reader.nccl:
        at = launched.get(correlation, began)
        size = args.elements * _BYTES.get(args.dtype, 0)
        collectives.append(Collective(args.collective or _kind_of(name), at, began, ended, size, args.dtype.lower()))
    return sorted(collectives, key=lambda one: one.launched_ns)


def _kind_of(kernel: str) -> str:
    """The collective of a kernel: `all_reduce` of `ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)`."""
    parts = kernel.split("(", maxsplit=1)[0].split("_")
    kinds = {"AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter"}
    return next((kinds.get(part, part.lower()) for part in parts[1:2]), "collective")


def _launch_times(reader: _Reader) -> dict[int, int]:
    table = np.frombuffer(reader.runtime).reshape(-1, 2)
    return dict(zip(table[:, 0].astype(np.int64).tolist(), _ns(table[:, 1]).tolist(), strict=True))


def _device_times(reader: _Reader) -> Ints:
    launched = _launch_times(reader)
    kernels = np.frombuffer(reader.kernels).reshape(-1, 3)
    ended_ns = _intervals(kernels[:, 1:])[:, 1].tolist()
    correlations = kernels[:, 0].astype(np.int64).tolist()
    rows = [(launched[key], ended) for key, ended in zip(correlations, ended_ns, strict=True) if key in launched]
    table = np.array(sorted(rows), np.int64).reshape(-1, 2)
    return np.stack([table[:, 0], np.maximum.accumulate(table[:, 1])], axis=1) if len(table) else table


def _ns(microseconds: npt.NDArray[np.float64]) -> Ints:
    """Nanoseconds. A product of microseconds since 1970 would lose the last digits."""
    whole = np.floor(microseconds)
    return np.asarray(whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000).astype(np.int64))


def _intervals(table: npt.NDArray[np.float64]) -> Ints:
    """Begin and end in nanoseconds from begin and duration in microseconds, shape [intervals, 2]."""
    began_ns = _ns(table[:, 0])
    return np.stack([began_ns, began_ns + np.maximum(0, _ns(table[:, 1]))], axis=1)


def _times(event: _Event) -> tuple[int, int]:
    whole = int(event.ts)
    began = whole * 1000 + round((event.ts - whole) * 1000)
    return began, began + max(0, round(event.dur * 1000))


def _field(path: Path, header: dict[str, msgspec.Raw], name: str, kind: Any) -> Any:
    if name not in header:
        return None
    try:
        return msgspec.json.decode(header[name], type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TraceFileError(path, f"{name} as torch.profiler writes it", error) from None
