"""Sums over the totals of all runs of a workspace, for the fleet report.

Totals are added in pages while they are read, so that memory grows with the hosts, tags and versions, and hardly with
the runs. Work on a page is done on arrays: one total at a time takes three times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, compress, pairwise
from operator import ne
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ddpobs.wire import Ints
from ddpobs_server.analysis.account.parts import is_lost
from ddpobs_server.analysis.fleet.regressions import Losses
from ddpobs_server.analysis.fleet.sums import NOT_KNOWN, GroupSums, Numbers, PartColumns, Sum, week_of, week_shares
from ddpobs_server.analysis.steps.joined_steps import Floats
from ddpobs_server.store import HostTotals

Key = tuple[str, str]
"""Kind of a group (`host`, `tag`, `torch`), and its name."""
Bools = npt.NDArray[np.bool_]
ALL: Key = ("all runs", "")
"""The group of all runs."""


class _Members(NamedTuple):
    """Attempts in groups, or their totals on one host; all arrays have the shape [members].

    Attributes:
        group: Number of the group.
        attempt: Index of the attempt.
        row: Index of its times: attempts first, then totals.
    """

    group: Ints
    attempt: Ints
    row: Ints


class FleetSums:
    """Sums over the totals of all runs.

    Args:
        weeks: First and last week that count.
    """

    def __init__(self, weeks: tuple[int, int]) -> None:
        self._weeks, self._parts, self._groups = weeks, PartColumns(), Numbers({ALL: 0})
        self._by_week, self._by_group = GroupSums(), GroupSums()
        self._losses: list[tuple[Ints, Losses]] = []

    def add(self, totals: HostTotals) -> None:
        """Add the totals of some whole runs. An attempt's time, tags and version of torch are the same on all hosts."""
        if not totals.run:
            return
        is_new_run = _changes(totals.run)
        is_new_attempt = is_new_run | _changes(totals.attempt)
        firsts = np.flatnonzero(is_new_attempt)
        run = np.cumsum(is_new_run, dtype=np.int64)[firsts]
        parts_ns = self._parts.table(totals.parts)
        of_attempts_ns = np.add.reduceat(parts_ns, firsts)
        began_ns, wall_ns = np.array(totals.began_ns)[firsts], np.array(totals.wall_ns)[firsts]
        shares = week_shares(began_ns, wall_ns, self._weeks)
        in_weeks_ns = of_attempts_ns[shares.time] * shares.share[:, None]
        self._by_week.add(shares.week - self._weeks[0], run[shares.time], in_weeks_ns)

        members = self._members(totals, np.cumsum(is_new_attempt, dtype=np.int64) - 1, firsts.tolist())
        share = np.bincount(shares.time, shares.share, len(firsts))[members.attempt]
        counted = share > 0
        group, of_attempt, row = (column[counted] for column in members)
        ns: Floats = np.concatenate([of_attempts_ns, parts_ns])[row] * share[counted, None]
        self._by_group.add(group, run[of_attempt], ns)
        self._add_losses(week_of(began_ns), of_attempts_ns, members)

    def _members(self, totals: HostTotals, attempt: Ints, firsts: list[int]) -> _Members:
        every, tags = np.arange(len(firsts)), [totals.tags[first] for first in firsts]
        torch = self._numbers("torch", [totals.torch[first] for first in firsts])
        tag = self._numbers("tag", list(chain.from_iterable(tags)))
        whole = np.concatenate([every, every, np.repeat(every, list(map(len, tags)))])
        return _Members(
            group=np.concatenate([0 * every, torch, tag, self._numbers("host", totals.host)]),
            attempt=np.concatenate([whole, attempt]),
            row=np.concatenate([whole, len(firsts) + np.arange(len(attempt))]),
        )

    def _numbers(self, kind: str, names: Sequence[str]) -> Ints:
        numbers = {name: self._groups[kind, name] for name in dict.fromkeys(names)}
        return np.fromiter(map(numbers.__getitem__, names), np.int64, len(names))

    def _add_losses(self, week: Ints, parts_ns: Floats, members: _Members) -> None:
        """Add the attempts' losses to all of their groups, as far as their time is known."""
        known = self._parts.where(lambda part: part != NOT_KNOWN)  # It counts as lost elsewhere.
        lost = self._parts.where(lambda part: part != NOT_KNOWN and is_lost(part))
        losses = Losses(week, parts_ns[:, known].sum(axis=1), parts_ns[:, lost].sum(axis=1))
        is_inside = ((week >= self._weeks[0]) & (week <= self._weeks[1]))[members.attempt]
        index = members.attempt[is_inside]
        self._losses.append((members.group[is_inside], Losses._make(column[index] for column in losses)))

    def by_week(self) -> dict[int, Sum]:
        """Return the sums of the weeks with runs, the oldest first."""
        sums = enumerate(self._by_week.sums(self._parts.names), self._weeks[0])
        return {week: total for week, total in sums if total.runs}

    def groups(self) -> dict[Key, Sum]:
        """Return the sums of the groups with runs."""
        sums = zip(self._groups, self._by_group.sums(self._parts.names), strict=False)
        return {key: total for key, total in sums if total.runs}

    def losses(self) -> dict[Key, Losses]:
        """Return the losses of the attempts of each group that began in the weeks."""
        if not self._losses:
            return {}
        group = np.concatenate([group for group, _ in self._losses])
        order = np.argsort(group, kind="stable")
        columns = [np.concatenate(parts)[order] for parts in zip(*(losses for _, losses in self._losses), strict=True)]
        bounds = np.searchsorted(group[order], np.arange(len(self._groups) + 1)).tolist()
        own = zip(self._groups, pairwise(bounds), strict=True)
        return {key: Losses._make(column[low:high] for column in columns) for key, (low, high) in own if high > low}


def _changes(values: Sequence[str]) -> Bools:
    """Whether each value differs from the one before; True for the first."""
    return np.array([True, *map(ne, values[1:], values)])


def with_tag(totals: HostTotals, tag: str) -> HostTotals:
    """Return the totals with a tag."""
    has_tag = [tag in tags for tags in totals.tags]
    return HostTotals._make(list(compress(column, has_tag)) for column in totals)
