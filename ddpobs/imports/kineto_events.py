"""What is kept of a Kineto trace while its events are read: pieces go by, columns of numbers stay.

A loop over all events only sorts them by category. What all events of a category need is done in comprehensions, which
take a third of the time of a call for each event.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ddpobs.imports.kineto_json import Annotation, Copy, DriverLaunch, Event, Fill, Kernel, Launch, Operator
from ddpobs.imports.rank_trace import Call, union
from ddpobs.imports.units import UnitRange, unit_range
from ddpobs.wire import Ints

_ENGINE = ("autograd::engine::evaluate_function", "torch.distributed.ddp.reducer::copy_bucket_to_grad")
"""The copy ends a backward."""
_LAUNCH = "c10d::"
_NOT_COLLECTIVE = ("c10d::monitored_barrier_", "c10d::send", "c10d::recv_", "c10d::recv_any_source_")
_GLOO = "gloo:"
_NCCL = "nccl"
_FORWARDS = ("DistributedDataParallel.forward", "FSDP::root_pre_forward")
_UNITS, _ENDS_BACKWARD = "FSDP::", "FSDP::root_post_backward_callback"
_OTHERS = (*_ENGINE, _LAUNCH, _UNITS, *_FORWARDS)
"""Operators that matter beside computation."""
_FETCH, _STEP, _OPTIMIZER, _ZERO = "enumerate(DataLoader)#", "ProfilerStep#", "Optimizer.step#", "Optimizer.zero_grad#"
_MAX_STEP = len(_STEP) + 16
_COMPUTED = "aten::"
_LONGEST_UNION = 2**20
"""Intervals of computation after which they are joined."""


class Intervals:
    """When events began and how long they lasted."""

    def __init__(self) -> None:
        self._began, self._took = array("d"), array("d")

    def __len__(self) -> int:
        return len(self._began)

    def extend(self, events: Sequence[Event]) -> None:
        """Add these events."""
        self._began.fromlist([event.ts for event in events])
        self._took.fromlist([event.dur for event in events])

    def intervals(self) -> Ints:
        """Return begin and end in nanoseconds, shape [intervals, 2]."""
        began_ns = _ns(np.frombuffer(self._began))
        return np.stack([began_ns, began_ns + np.maximum(0, _ns(np.frombuffer(self._took)))], axis=1)


class Computation:
    """When something was computed."""

    def __init__(self) -> None:
        self._latest = Intervals()
        self._joined: Ints = np.zeros((0, 2), np.int64)

    def extend(self, events: Sequence[Event]) -> None:
        """Add these events."""
        self._latest.extend(events)
        if len(self._latest) > _LONGEST_UNION:
            self._joined, self._latest = self.union(), Intervals()

    def union(self) -> Ints:
        """Return begin and end in nanoseconds of the union, shape [intervals, 2], in order."""
        return union(np.concatenate([self._joined, self._latest.intervals()]))


class Kernels:
    """Work of a GPU, and the host's calls that launched it, joined by their correlation."""

    def __init__(self) -> None:
        self._correlation, self._work = array("q"), Intervals()
        self._launch_correlation, self._launched = array("q"), array("d")

    def __len__(self) -> int:
        return len(self._correlation)

    def extend(self, events: Sequence[Kernel | Copy | Fill]) -> None:
        """Add kernels and copies."""
        self._correlation.fromlist([event.args.correlation for event in events])
        self._work.extend(events)

    def extend_launches(self, events: Sequence[Launch | DriverLaunch]) -> None:
        """Add the host's calls."""
        self._launch_correlation.fromlist([event.args.correlation for event in events])
        self._launched.fromlist([event.ts for event in events])

    def launched_ns(self, correlations: Ints) -> tuple[npt.NDArray[np.bool_], Ints]:
        """Return which correlations have a call, and when the last one with each of these began."""
        known, last = np.unique(np.frombuffer(self._launch_correlation, np.int64)[::-1], return_index=True)
        began_ns = _ns(np.frombuffer(self._launched)[::-1][last])
        is_known = np.isin(correlations, known)
        return is_known, began_ns[np.searchsorted(known, correlations[is_known])]

    def device_ns(self) -> Ints:
        """Return when each was launched, and when all that was launched until then was done, shape [launches, 2]."""
        is_known, launched_ns = self.launched_ns(np.frombuffer(self._correlation, np.int64))
        ended_ns = self._work.intervals()[is_known, 1]
        order = np.lexsort((ended_ns, launched_ns))
        return np.stack([launched_ns[order], np.maximum.accumulate(ended_ns[order])], axis=1)


class KinetoEvents:
    """The events of one file that matter, as they are added. Times are in nanoseconds.

    A call that ends before it began is left out.

    Attributes:
        steps: Number and begin of each step.
        calls: Calls of the training thread, without backward.
        engine: The autograd engine's functions.
        zeroed: Ends of the optimizers' `zero_grad`.
        units: Ranges in which units of fully sharded modules are gathered, used and reduced.
        launches: Begin, end and name of the host's launches of collectives.
        gloo: Begin, end and name of gloo's collectives.
        nccl: The kernels of NCCL.
        on_host: Computation on the host.
        on_gpu: Computation on a GPU.
        kernels: Kernels and copies.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.calls: list[Call] = []
        self.zeroed: list[int] = []
        self.units: list[UnitRange] = []
        self.launches: list[tuple[int, int, str]] = []
        self.gloo: list[tuple[int, int, str]] = []
        self.nccl: list[Kernel] = []
        self.engine, self.on_host, self.on_gpu, self.kernels = Intervals(), Computation(), Computation(), Kernels()
        self._takers: dict[type[Event], Callable[[list[Any]], None]] = {
            Annotation: self._annotations,
            Operator: self._operators,
            Kernel: self._kernels,
            Copy: self.kernels.extend,
            Fill: self.kernels.extend,
            Launch: self.kernels.extend_launches,
            DriverLaunch: self.kernels.extend_launches,
        }

    def add(self, events: Sequence[Event]) -> None:
        """Add a piece of the file."""
        groups: dict[type[Event], list[Event]] = {kind: [] for kind in self._takers}
        appends = {kind: group.append for kind, group in groups.items()}
        for event in events:
            if (append := appends.get(type(event))) is not None:
                append(event)
        for kind, group in groups.items():
            if group:
                self._takers[kind](group)

    def _annotations(self, events: Sequence[Annotation | Operator]) -> None:
        for event in events:
            if event.dur < 0:
                continue
            if event.name.startswith(_UNITS):
                self._unit(event)
            self._annotation(event.name, *times_ns(event))

    def _unit(self, event: Annotation | Operator) -> None:
        if event.name == _ENDS_BACKWARD:
            self.engine.extend([event])
        elif (found := unit_range(event.name, *times_ns(event))) is not None:
            self.units.append(found)

    def _annotation(self, name: str, began_ns: int, ended_ns: int) -> None:
        if name.startswith(_STEP) and name[len(_STEP) :].isdecimal() and len(name) < _MAX_STEP:
            self.steps.append((int(name[len(_STEP) :]), began_ns))
        elif name in _FORWARDS:
            self.calls.append(Call("forward", began_ns, ended_ns))
        elif name.startswith(_FETCH):
            self.calls.append(Call("fetch", began_ns, ended_ns))
        elif name.startswith(_OPTIMIZER):
            self.calls.append(Call("optimizer", began_ns, ended_ns))
        elif name.startswith(_ZERO):
            self.zeroed.append(ended_ns)
        elif name.startswith(_GLOO):
            self.gloo.append((began_ns, ended_ns, name[len(_GLOO) :]))

    def _operators(self, events: list[Operator]) -> None:
        computed: list[Operator] = []
        others: list[Operator] = []
        for event in events:
            if event.name.startswith(_COMPUTED):
                computed.append(event)
            elif event.name.startswith(_OTHERS):
                others.append(event)
        self.on_host.extend(computed)
        self.engine.extend([event for event in others if event.name.startswith(_ENGINE) and event.dur >= 0])
        for event in [event for event in others if not event.name.startswith(_ENGINE)]:
            if not event.name.startswith(_LAUNCH):
                self._annotations([event])
            elif event.name not in _NOT_COLLECTIVE:
                self.launches.append((*times_ns(event), event.name[len(_LAUNCH) :].strip("_")))

    def _kernels(self, events: list[Kernel]) -> None:
        computed = [event for event in events if not event.name.startswith(_NCCL)]
        if len(computed) < len(events):
            self.nccl += [event for event in events if event.name.startswith(_NCCL)]
        self.kernels.extend(computed)
        self.on_gpu.extend(computed)


def times_ns(event: Event) -> tuple[int, int]:
    """Return begin and end of an event. A product of microseconds since 1970 would lose the last digits."""
    whole = int(event.ts)
    began_ns = whole * 1000 + round((event.ts - whole) * 1000)
    return began_ns, began_ns + max(0, round(event.dur * 1000))


def _ns(microseconds: npt.NDArray[np.float64]) -> Ints:
    whole = np.floor(microseconds)
    return np.asarray(whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000).astype(np.int64))
