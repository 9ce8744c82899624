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

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from ddpobs.errors import TraceFileError
from ddpobs.imports.kineto_events import KinetoEvents, times_ns
from ddpobs.imports.kineto_json import Decoder
from ddpobs.imports.rank_trace import Call, CallKind, Collective, RankTrace
from ddpobs.imports.trace_events import TraceEvents
from ddpobs.imports.units import with_units
from ddpobs.wire import Ints

_SCATTER = "reduce_scatter"
_NAMES = {"barrier": "barrier", "reducescatter": _SCATTER, "allreduce": "all_reduce", "allgather": "all_gather"}
_BYTES = {"Float": 4, "Half": 2, "BFloat16": 2, "Double": 8, "Int": 4, "Long": 8, "Byte": 1, "Char": 1, "Bool": 1}


_MAX_RANKS = 2**20
_Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Members(msgspec.Struct):
    name: str = msgspec.field(default="", name="pg_name")
    ranks: list[int] = []


class _Group(msgspec.Struct):
    backend: str = ""
    rank: Annotated[int, msgspec.Meta(ge=0, lt=_MAX_RANKS)] | None = None
    world_size: Annotated[int, msgspec.Meta(ge=1, le=_MAX_RANKS)] | None = None
    groups: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="pg_config")

    @property
    def members(self) -> dict[str, tuple[int, ...]] | None:
        """Ranks of each process group by its name; None where a version does not write them, or in another form."""
        try:
            known = msgspec.json.decode(self.groups, type=list[_Members])
        except (msgspec.DecodeError, RecursionError):
            return None
        world = range(self.world_size or 0)
        return {one.name: tuple(sorted(one.ranks or world)) for one in known}  # Torch leaves out the world's.


class _Device(msgspec.Struct):
    name: str = ""


def read(path: Path, advance: Callable[[int], object] = lambda _: None) -> RankTrace:
    """Read the trace of one rank.

    Args:
        path: File of `torch.profiler.profile.export_chrome_trace`, plain or gzip.
        advance: Is called with the number of further bytes that were read.

    Raises:
        TraceFileError: The file is no such trace, is cut off, or has no step.
    """
    events, reader = TraceEvents(path, Decoder(), advance), KinetoEvents()
    for piece in events.pieces():
        reader.add(piece)
    header = events.header
    group = _field(path, header, "distributedInfo", _Group) or _Group()
    if group.rank is not None and group.rank >= (group.world_size or _MAX_RANKS):
        raise TraceFileError(path, f"one of {group.world_size} ranks", f"rank {group.rank}")
    devices = _field(path, header, "deviceProperties", list[_Device]) or []
    on_gpu = len(reader.kernels) > 0
    members = group.members
    trace = RankTrace(
        source=path.name,
        rank=group.rank,
        world_size=group.world_size,
        host=_field(path, header, "host_name", str) or "",
        backend=group.backend or ("nccl" if on_gpu else "gloo"),
        device=devices[0].name if on_gpu and devices else "cuda" if on_gpu else "cpu",
        wall_ns=_field(path, header, "baseTimeNanoseconds", _Nanoseconds) or 0,
        steps=sorted(reader.steps),
        calls=_calls(reader),
        collectives=_nccl(reader, members or {}) if on_gpu else _of_gloo(reader),
        computing_ns=(reader.on_gpu if on_gpu else reader.on_host).union(),
        device_ns=reader.kernels.device_ns(),
        groups=None if members is None else _parts(members.values(), group.world_size or 0),
    )
    if reader.units:
        trace = replace(trace, collectives=with_units(trace, reader.units))
    if not any(call.kind == "backward" for call in trace.calls):
        raise TraceFileError(path, "a trace of a training, with at least one backward", f"{len(trace.calls)} calls")
    return trace


def _parts(groups: Iterable[tuple[int, ...]], world_size: int) -> tuple[tuple[int, ...], ...]:
    """The process groups of several ranks that are a part of the world."""
    return tuple({group for group in groups if 1 < len(group) < world_size})


def _calls(reader: KinetoEvents) -> list[Call]:
    """The calls in order, with each backward, and a forward before it where the trace names none."""
    calls = sorted(reader.calls, key=lambda call: call.began_ns)
    edges = sorted([*(call.began_ns for call in calls), *(began for _, began in reader.steps)])
    backwards = _backwards(reader.engine.intervals(), edges)
    if not any(call.kind == "forward" for call in calls):
        starts = sorted(
            [*(began for _, began in reader.steps), *(c.ended_ns for c in calls if c.kind == "fetch"), *reader.zeroed]
        )
        for backward in backwards:
            at = bisect_left(starts, backward.began_ns)
            began = starts[at - 1] if at else backward.began_ns
            calls.append(Call("forward", began, backward.began_ns))
    return sorted([*calls, *backwards], key=lambda call: call.began_ns)


def _backwards(engine: Ints, edges: list[int]) -> list[Call]:
    """Join the engine's functions that no other call of the training thread separates.

    Args:
        engine: Begin and end of each function, shape [functions, 2].
        edges: Begins of the other calls, in order.
    """
    if not len(engine):
        return []
    engine = engine[np.argsort(engine[:, 0], kind="stable")]
    gaps = np.searchsorted(edges, engine[:, 0])
    first = np.flatnonzero(np.append(True, gaps[1:] != gaps[:-1]))
    ended = np.maximum.reduceat(engine[:, 1], first)
    kind: CallKind = "backward"
    return [Call(kind, *times) for times in zip(engine[first, 0].tolist(), ended.tolist(), strict=True)]


def _of_gloo(reader: KinetoEvents) -> list[Collective]:
    """Join gloo's works with their launches: it begins them in the order of the launches."""
    launches = sorted(reader.launches)
    collectives, at = [], 0
    for began, ended, name in sorted(reader.gloo):
        if at < len(launches) and launches[at][0] <= began:
            launched, _, operator = launches[at]
            at += 1
            name = _SCATTER if _SCATTER in operator else name  # noqa: PLW2901 - gloo makes it of all-reduces.
        else:
            launched = began
        collectives.append(Collective(name, launched, began, max(began, ended)))
    return sorted(collectives, key=lambda one: one.launched_ns)


def _nccl(reader: KinetoEvents, groups: Mapping[str, tuple[int, ...]]) -> list[Collective]:
    """The kernels of NCCL, with the host's launches where the trace has them; `groups` has ranks by group's name."""
    correlations = np.array([kernel.args.correlation for kernel in reader.nccl], np.int64)
    is_known, known_ns = reader.kernels.launched_ns(correlations)
    launched = dict(zip(correlations[is_known].tolist(), known_ns.tolist(), strict=True))
    collectives = []
    for kernel in reader.nccl:
        args, (began, ended) = kernel.args, times_ns(kernel)
        at, size = launched.get(args.correlation, began), max(args.elements, args.gathered) * _BYTES.get(args.dtype, 0)
        name = _collective(args.collective) or _collective(_kind_of(kernel.name))
        members = tuple(groups.get(args.group) or _ranks(str(args.ranks)))
        collectives.append(Collective(name, at, began, ended, size, args.dtype.lower(), group=members))
    return sorted(collectives, key=lambda one: one.launched_ns)


@lru_cache(1024)
def _ranks(text: str) -> list[int]:
    """The ranks of a group as torch writes them, `[0, 2]`; none of a long group, which torch cuts short."""
    return [] if "..." in text else [int(number) for number in re.findall(r"\d{1,9}", text)]


@lru_cache(1024)
def _kind_of(kernel: str) -> str:
    """The collective in the name of a kernel, `AllReduce` in `ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)`."""
    return next(iter(kernel.split("(", maxsplit=1)[0].split("_")[1:2]), "collective")


@lru_cache(1024)
def _collective(name: str) -> str:
    """One name of a collective, whose names are many: `AllReduce`, `allreduce_coalesced`, `_reduce_scatter_base`."""
    letters = name.lower().replace("_", "")
    return next((known for part, known in _NAMES.items() if part in letters), letters)


def _field(path: Path, header: dict[str, msgspec.Raw], name: str, kind: Any) -> Any:
    if name not in header:
        return None
    try:
        return msgspec.json.decode(header[name], type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TraceFileError(path, f"{name} as torch.profiler writes it", error) from None
