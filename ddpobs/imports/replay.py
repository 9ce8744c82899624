"""A trace, told to the step tracker in the order in which its training told it: the tracker makes the same steps of it.

Reductions that were launched in a backward are its gradient buckets, or if units of fully sharded modules are named,
the collectives of units its spans. Any other collective counts as communication where nothing was computed beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from math import prod
from typing import NamedTuple

from ddpobs import wire
from ddpobs.clocks import HostClock
from ddpobs.errors import TraceFileError
from ddpobs.imports.rank_trace import Call, Collective, RankTrace
from ddpobs.imports.units import UnitLayout, passes, reduces
from ddpobs.steps.backward_record import BackwardRecord
from ddpobs.steps.raw_step import NO_INPUT, RawStep
from ddpobs.steps.step_columns import RawSteps
from ddpobs.steps.step_tracker import StepTracker
from ddpobs.steps.summary import Summariser, Summary

_REDUCED = ("all_reduce", "reduce_scatter")
"""Collectives that reduce gradients."""
_MAX_NAME = 1024
_USER = wire.COMM_KINDS.index("user")


class _Work(NamedTuple):
    """A collective that tells how long it was under way."""

    took_ns: int

    def _get_duration(self) -> float:
        return self.took_ns / 1e6


class Replayed(NamedTuple):
    """The steps of a trace, and the layouts of their buckets.

    `group` has the ranks with which this one reduces gradients, none if they are all ranks; None if it is not known.
    """

    summary: Summary
    layouts: list[wire.Layout]
    group: tuple[int, ...] | None = ()


class _Layouts:
    """Layouts in the order in which backward passes used them."""

    def __init__(self) -> None:
        self.known: list[wire.Layout] = []
        self._sizes: dict[tuple[tuple[str, int], ...], int] = {}

    def records(self, trace: RankTrace, reduced: list[Collective]) -> list[BackwardRecord]:
        """Return the record of a backward with these buckets."""
        reduced.sort(key=lambda one: one.order)
        return [_record(trace, reduced, self._revision(reduced))]

    def _revision(self, collectives: list[Collective]) -> int:
        """Number of the layout with these buckets; a new one is added."""
        sizes = tuple((one.parameter, one.size_bytes) for one in collectives)
        if sizes not in self._sizes:
            self._sizes[sizes] = len(self.known)
            buckets = [
                wire.Bucket(size_bytes=one.size_bytes, dtype=one.dtype, parameters=_parameters(one))
                for one in collectives
            ]
            self.known.append(
                wire.Layout(module=0, name="model", revision=len(self.known), comm="all_reduce", buckets=buckets)
            )
        return self._sizes[sizes]


def _parameters(one: Collective) -> list[wire.Parameter]:
    return [wire.Parameter(name=one.parameter[:_MAX_NAME], size=0)] if one.parameter else []


def replay(trace: RankTrace) -> Replayed:
    """Return the steps of a trace. A step that has begun at its end, and not reduced its gradients, is left out.

    Raises:
        TraceFileError: The trace has no step.
    """
    raws: list[RawStep] = []
    tracker = StepTracker(raws.append, first=trace.steps[0][0] if trace.steps else 0)
    if any(one.unit for one in trace.collectives):
        buckets, others = passes(trace)
        layouts: _Layouts | UnitLayout = UnitLayout(buckets)
    else:
        buckets, others = _shared_out(trace)
        layouts = _Layouts()
    events: list[tuple[int, Callable[[], object]]] = []
    following = [call.began_ns for call in trace.calls[1:]]
    for call, reduced, next_ns in zip_longest(trace.calls, buckets, following):
        is_late = next_ns is not None and not trace.on_device
        events += _told(tracker, trace, call, _done_before(reduced, next_ns) if is_late else reduced, layouts)
    for one in others:
        events.append((one.launched_ns, partial(_wait, tracker, trace, one)))
    for at_ns, tell in sorted(events, key=lambda event: event[0]):
        tracker.stamp = trace.stamp(at_ns)
        tell()
    tracker.training_finished()
    if not raws:
        raise TraceFileError(trace.source, "a step that reduces gradients from its begin to its end", "none")
    summary = Summariser().summarise(RawSteps.from_steps(raws, HostClock()))
    return Replayed(summary, layouts.known, _group(trace, [one for each in buckets for one in each]))


def _group(trace: RankTrace, reduced: list[Collective]) -> tuple[int, ...] | None:
    """The ranks of the process group that reduces gradients, if it is a part of the world; None if it is not known.

    Shards and replicas of a unit are together the world, or with tensor parallelism a part whose ranks are not known.
    """
    ranks = trace.world_size or 0
    groups = {one.group for one in reduced if one.group and reduces(one)}
    if not groups and trace.groups != () and not _spans_world(trace, reduced):
        return None
    if not groups or max(map(len, groups)) >= ranks or prod(map(len, groups)) >= ranks:
        return ()
    return max(groups, key=lambda group: (len(group), group))


def _spans_world(trace: RankTrace, reduced: list[Collective]) -> bool:
    """Whether units have shards and replicas, and the rank's only two process groups make up the world."""
    kinds = {one.kind for one in reduced if one.unit and reduces(one)}
    sizes = [len(group) for group in trace.groups or ()]
    return len(kinds) > 1 and len(sizes) == 2 and prod(sizes) == trace.world_size


def _shared_out(trace: RankTrace) -> tuple[list[list[Collective]], list[Collective]]:
    """The buckets of each call, and all other collectives."""
    buckets: list[list[Collective]] = [[] for _ in trace.calls]
    others: list[Collective] = []
    for one, backward in trace.with_backwards():
        if backward is None or trace.calls[backward].began_ns > one.launched_ns or one.name not in _REDUCED:
            others.append(one)
        else:
            buckets[backward].append(one)
    return buckets, others


def _done_before(reduced: list[Collective], next_ns: int) -> list[Collective]:
    """The buckets, done when the next call begins: a thread may note a completion after training has seen it."""
    return [one._replace(done_ns=min(one.done_ns, next_ns)) for one in reduced]


def _told(
    tracker: StepTracker, trace: RankTrace, call: Call, reduced: list[Collective], layouts: _Layouts | UnitLayout
) -> list[tuple[int, Callable[[], object]]]:
    """The events of a call, with their times."""
    if call.kind == "fetch":
        return [(call.began_ns, lambda: tracker.fetch_began(True, False)), (call.ended_ns, tracker.fetch_ended)]
    if call.kind == "forward":
        return [(call.began_ns, lambda: tracker.forward_began(0, True, *NO_INPUT))]
    if call.kind == "optimizer":
        return [(call.began_ns, tracker.optimizer_began), (call.ended_ns, tracker.optimizer_ended)]

    def end() -> None:
        for record in layouts.records(trace, reduced) if reduced else ():
            tracker.gradients_reduced(0, record, False)
        tracker.stamp = max([tracker.stamp, *(one.done_ns for one in reduced)])
        tracker.backward_ended()

    return [(call.began_ns, tracker.backward_began), (call.ended_ns, end)]


def _record(trace: RankTrace, reduced: list[Collective], revision: int) -> BackwardRecord:
    record = BackwardRecord(0, revision)
    for index, one in enumerate(reduced):
        launched_ns = trace.stamp(one.launched_ns)
        record.ready_ns.append(launched_ns)
        record.launched_ns.append(launched_ns)
        record.done_ns.append(one.done_ns)
        if one.started_ns:
            record.works[index] = _Work(one.done_ns - one.started_ns)
    return record


def _wait(tracker: StepTracker, trace: RankTrace, one: Collective) -> None:
    for began_ns, ended_ns in trace.uncovered(one.started_ns or one.launched_ns, one.done_ns):
        tracker.comm_ended(0, _USER, began_ns, ended_ns)
