"""Which ranks reduce gradients together, where their files do not tell it: the collectives of a group end together.

Clocks of ranks differ by an offset. So the difference between the ends of a collective on two ranks is the same for all
collectives of their group. Ranks that do not wait for each other drift apart, and where they meet once in a step, the
difference is another one at that place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ddpobs import wire
from ddpobs.imports.rank_trace import RankTrace

_FULL = {"all_reduce", "reduce_scatter", "all_gather", "barrier"}
"""Collectives that no rank leaves before all have come."""
_MIN_STEPS = 3
_TOGETHER, _APART = 0.1, 0.25
"""Spread of the differences, as a share of the step, up to which ends agree, and above which they do not.

A rank counts as late from a tenth of the step on. Ranks that drift apart by that much in each step spread by a quarter
of a step in five steps.
"""
Group = tuple[int, ...]
"""Ranks that reduce gradients together; none if they are all ranks."""
_Steps = dict[tuple[Any, ...], list[int]]
"""When collectives ended, by the number of their step and their names."""


class Ends:
    """When the collectives of each step ended on one rank.

    Args:
        trace: The rank's trace.
        steps: Its steps.
    """

    def __init__(self, trace: RankTrace, steps: wire.Steps) -> None:
        self._rank, self._numbers = trace.rank or 0, steps.collective.tolist()
        self._step_ns = float(np.median(steps.end_ns - steps.start_ns))
        full = [one for one in trace.collectives if one.name in _FULL]
        places = np.searchsorted(steps.start_ns, [one.done_ns for one in full], "right") - 1
        self._placed = [(place, one) for place, one in zip(places.tolist(), full, strict=True) if place >= 0]
        self._groups = {one.group for one in full}
        self._done_ns: dict[frozenset[Group], _Steps] = {}

    def _with(self, rank: int) -> _Steps:
        """The collectives in which that rank takes part too, or may: not each one has a known group."""
        groups = frozenset(group for group in self._groups if not group or rank in group)
        if groups not in self._done_ns:
            names: list[list[str]] = [[] for _ in self._numbers]
            done_ns: list[list[int]] = [[] for _ in self._numbers]
            for place, one in self._placed:
                if one.group in groups:
                    names[place].append(one.name)
                    done_ns[place].append(one.done_ns)
            each = zip(self._numbers, names, done_ns, strict=True)
            self._done_ns[groups] = {(number, *of_step): ends for number, of_step, ends in each}
        return self._done_ns[groups]

    def spread(self, other: Ends) -> float | None:
        """How far the differences between the ends of two ranks spread, as a share of the step.

        None if too few steps have the same collectives on both.
        """
        own_ns, others_ns = self._with(other._rank), other._with(self._rank)
        common = [key for key in own_ns.keys() & others_ns.keys() if len(key) > 1]
        alike = Counter(key[1:] for key in common).most_common(1)
        steps = [key for key in common if key[1:] == alike[0][0]]
        if len(steps) < _MIN_STEPS:
            return None
        difference_ns = np.array([own_ns[key] for key in steps]) - [others_ns[key] for key in steps]
        over_steps = np.diff(np.percentile(difference_ns, [25, 75], axis=0), axis=0)
        over_places = np.ptp(np.median(difference_ns, axis=0))
        return max(float(np.median(over_steps)), float(over_places)) / self._step_ns


class Compared(NamedTuple):
    """The ranks that are compared.

    Attributes:
        groups: The group of each rank.
        reason: Why no ranks are compared; empty if they are.
    """

    groups: list[Group]
    reason: str


def groups_of(traces: Sequence[RankTrace], steps: Sequence[wire.Steps], known: Sequence[Group | None]) -> Compared:
    """Return the groups whose ranks are compared.

    Args:
        traces: One of each rank.
        steps: Their steps, in the same order.
        known: Their groups, in the same order; None where the file does not tell it.
    """
    ends = {trace.rank or 0: Ends(trace, each) for trace, each in zip(traces, steps, strict=True)}
    found = {rank: group for rank, group in zip(ends, known, strict=True) if group is not None or len(ends) == 1}
    for candidate in _candidates(traces):
        ranks = [rank for rank in ends if rank not in found and (not candidate or rank in candidate)]
        spread = _spread(ends, ranks)
        if spread is not None and spread <= _TOGETHER:
            found |= dict.fromkeys(ranks, candidate)
    groups = [found.get(rank) or () for rank in ends]
    if len(found) < len(ends):
        return Compared(groups, "the files do not tell which ranks reduce gradients together")
    for group in {*groups}:
        if (_spread(ends, [rank for rank in ends if found[rank] == group]) or 0) > _APART:
            return Compared(groups, "the collectives of the ranks do not end together, as those of one run do")
    return Compared(groups, "")


def _candidates(traces: Sequence[RankTrace]) -> list[Group]:
    """All ranks, and the process groups, the largest first."""
    parts = {group for trace in traces for group in trace.groups or ()}
    return [(), *sorted(parts, key=lambda group: (-len(group), group))]


def _spread(ends: Mapping[int, Ends], ranks: Sequence[int]) -> float | None:
    """The largest spread between the first of some ranks and another one; None if one of them is not known."""
    spreads = [ends[ranks[0]].spread(ends[rank]) for rank in ranks[1:]]
    known = [spread for spread in spreads if spread is not None]
    return max(known) if known and len(known) == len(spreads) else None
