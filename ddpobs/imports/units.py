"""The units of fully sharded modules in a trace: torch names them in the ranges around their collectives.

A unit's collective is the one that was launched in the range of that unit. The spans of a pass, a forward with its
backward, are those of a live run.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from ddpobs import wire
from ddpobs.imports.rank_trace import Collective, RankTrace
from ddpobs.steps.backward_record import BackwardRecord

_RANGE = re.compile(
    r"FSDP::(all_gather_copy_out|all_gather|post_backward_accumulate|post_backward_reduce)"
    r"(?: \((.*)\))?(?: \[pg=\d+\])?"
)
_GATHER, _GATHER_AGAIN, _SCATTER, _REDUCE = wire.UNIT_KINDS[:4]
_ROOT = "(root)"
_GATHERS, _USES = "all_gather", "all_gather_copy_out"
_IS_READY, _REDUCES = "post_backward_accumulate", "post_backward_reduce"
_MAX_NAME = 1024


class UnitRange(NamedTuple):
    """A range of torch's that names a unit: it gathers or uses it, has its gradients, or reduces them."""

    began_ns: int
    ended_ns: int
    does: str
    unit: str


def unit_range(name: str, began_ns: int, ended_ns: int) -> UnitRange | None:
    """Return what a range of this name does with a unit; None if it is another one."""
    found = _RANGE.fullmatch(name)
    return UnitRange(began_ns, ended_ns, found[1], (found[2] or _ROOT)[:_MAX_NAME]) if found else None


def with_units(trace: RankTrace, ranges: Sequence[UnitRange]) -> list[Collective]:
    """Return the collectives; those that were launched in a unit's range have the unit, and when training waits.

    Args:
        trace: The rank's trace, its collectives in the order of their launch.
        ranges: Of the training thread and the engine's.
    """
    backwards = sorted((call.began_ns, call.ended_ns) for call in trace.calls if call.kind == "backward")
    launching = sorted(one for one in ranges if one.does in (_GATHERS, _REDUCES))
    ready, uses = _Begins(ranges, _IS_READY), _Begins(ranges, _USES)
    found: list[Collective] = []
    before = -1
    for one in trace.collectives:
        around = _around(launching, one.launched_ns)
        if around is None:
            found.append(one)
            continue
        one = _named(one, around, backwards, ready)  # noqa: PLW2901 - each step adds what it knows.
        if not trace.on_device:
            found.append(_blocking(trace, one, around, uses))
            continue
        if around.does == _REDUCES:
            if before >= 0 and found[before].ready_ns < trace.stamp(one.ready_ns):
                found[before] = found[before]._replace(waited_from_ns=trace.stamp(one.ready_ns))
            before = len(found)
        found.append(_on_device(trace, one, around, uses))
    return found


def _around(ranges: Sequence[UnitRange], at_ns: int) -> UnitRange | None:
    """The range that has begun last, if it has not ended."""
    index = bisect_right(ranges, at_ns, key=lambda one: one.began_ns) - 1
    return ranges[index] if index >= 0 and at_ns <= ranges[index].ended_ns else None


class _Begins:
    """When ranges that do the same began, by their unit."""

    def __init__(self, ranges: Iterable[UnitRange], does: str) -> None:
        self._began: dict[str, list[int]] = {}
        for one in sorted(ranges):
            if one.does == does:
                self._began.setdefault(one.unit, []).append(one.began_ns)

    def before(self, unit: str, at_ns: int) -> int:
        """The last begin until a moment; that moment without one."""
        began = self._began.get(unit, [])
        index = bisect_right(began, at_ns) - 1
        return began[index] if index >= 0 else at_ns

    def after(self, unit: str, at_ns: int) -> int:
        """The first begin after a moment; 0 without one."""
        began = self._began.get(unit, [])
        index = bisect_right(began, at_ns)
        return began[index] if index < len(began) else 0


def _named(one: Collective, around: UnitRange, backwards: Sequence[tuple[int, int]], ready: _Begins) -> Collective:
    if around.does == _REDUCES:
        kind = _REDUCE if one.name == "all_reduce" else _SCATTER
        return one._replace(unit=around.unit, kind=kind, ready_ns=ready.before(around.unit, around.began_ns))
    index = bisect_right(backwards, (one.launched_ns, 2**63)) - 1
    inside = index >= 0 and one.launched_ns <= backwards[index][1]
    return one._replace(unit=around.unit, kind=_GATHER_AGAIN if inside else _GATHER, ready_ns=one.launched_ns)


def _blocking(trace: RankTrace, one: Collective, around: UnitRange, uses: _Begins) -> Collective:
    """A collective on a host: most end within their range, whose thread waits for them."""
    if one.done_ns - around.ended_ns > around.ended_ns - one.launched_ns:
        waited_from_ns = uses.after(one.unit, one.launched_ns) if around.does == _GATHERS else 0
        return one._replace(waited_from_ns=min(waited_from_ns, one.done_ns))
    # The call returns later than the work's own thread is done, before the host computes again.
    returned_ns = min(trace.computes_after(one.done_ns), around.ended_ns)
    return one._replace(done_ns=returned_ns, waited_from_ns=one.launched_ns)


def _on_device(trace: RankTrace, one: Collective, around: UnitRange, uses: _Begins) -> Collective:
    """A collective on a device, which runs beside the computation. A reduction is waited for by the next one."""
    launched_ns = one.started_ns or trace.stamp(one.launched_ns)
    if around.does == _REDUCES:
        return one._replace(ready_ns=min(trace.stamp(one.ready_ns), launched_ns))
    used_ns = uses.after(one.unit, one.launched_ns)
    return one._replace(ready_ns=launched_ns, waited_from_ns=trace.stamp(used_ns) if used_ns else 0)


def passes(trace: RankTrace) -> tuple[list[list[Collective]], list[Collective]]:
    """The units' collectives by call, all at the backward that reduces their gradients next; and all others."""
    by_call: list[list[Collective]] = [[] for _ in trace.calls]
    others: list[Collective] = []
    for one, backward in trace.with_backwards():
        (others if backward is None or not one.unit else by_call[backward]).append(one)
    backwards = [index for index, call in enumerate(trace.calls) if call.kind == "backward"]
    for index, following in pairwise(backwards):
        if not any(map(reduces, by_call[index])):  # A micro-batch of several.
            by_call[index], by_call[following] = [], by_call[index] + by_call[following]
    if backwards and not any(map(reduces, by_call[backwards[-1]])):
        others += by_call[backwards[-1]]
        by_call[backwards[-1]] = []
    return by_call, others


def reduces(one: Collective) -> bool:
    """Whether a bucket or a unit's collective reduces gradients, and does not gather parameters."""
    return one.kind not in (_GATHER, _GATHER_AGAIN)


class UnitLayout:
    """A row for each collective of each unit, in the order of the launches of the pass that has most of them.

    Args:
        by_backward: Collectives of units, by backward.
    """

    def __init__(self, by_backward: Sequence[Sequence[Collective]]) -> None:
        rows: dict[tuple[str, str], Collective] = {}
        for collectives in sorted(by_backward, key=lambda each: -len({(one.unit, one.kind) for one in each})):
            for one in collectives:
                rows.setdefault((one.unit, one.kind), one)
        self._index = {key: index for index, key in enumerate(rows)}
        buckets = [
            wire.Bucket(size_bytes=one.size_bytes, dtype=one.dtype, parameters=[], kind=one.kind, unit=one.unit)
            for one in rows.values()
        ]
        self.known = [wire.Layout(module=0, name="model", revision=0, comm="fully_shard", buckets=buckets)]

    def records(self, trace: RankTrace, collectives: Sequence[Collective]) -> list[BackwardRecord]:
        """Return a record of each pass: another one begins where a collective comes again."""
        records: list[BackwardRecord] = []
        for one in collectives:
            index = self._index[one.unit, one.kind]
            if not records or records[-1].launched_ns[index]:
                records.append(BackwardRecord(0, 0, len(self._index)))
                records[-1].waited_from_ns = [0] * len(self._index)
            record = records[-1]
            record.ready_ns[index], record.done_ns[index] = one.ready_ns, one.done_ns
            begun_ns = one.started_ns if trace.on_device else 0
            record.launched_ns[index] = max(one.ready_ns, begun_ns or one.launched_ns)
            assert record.waited_from_ns is not None
            record.waited_from_ns[index] = one.waited_from_ns
        return records
