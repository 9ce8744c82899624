"""Sums of rank time: by week, host, tag and version of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ddpobs.wire import Ints
from ddpobs_server.analysis.account.parts import is_lost, is_productive
from ddpobs_server.analysis.steps.joined_steps import Floats

DAY_NS = 86_400 * 10**9
WEEK_NS = 7 * DAY_NS
_MONDAY_NS = 4 * DAY_NS
"""The first Monday of Unix time, which begins on a Thursday."""
NOT_KNOWN = "not_known"
"""The part of the account without an explanation."""


def week_of(at_ns: Any) -> Any:
    """Return the number of the week of a time, or of times; weeks begin on Mondays, 0:00 UTC."""
    return (at_ns - _MONDAY_NS) // WEEK_NS


def week_begin_ns(week: Any) -> Any:
    """Return the begin of a week as Unix time, in ns, or of weeks."""
    return week * WEEK_NS + _MONDAY_NS


class WeekShares(NamedTuple):
    """Shares of times that lie in weeks; all arrays have the shape [shares].

    Attributes:
        time: Index of the time.
        week: The week.
        share: Share of the time in this week, above 0.
    """

    time: Ints
    week: Ints
    share: Floats


def week_shares(began_ns: Ints, wall_ns: Ints, weeks: tuple[int, int]) -> WeekShares:
    """Return the share of each time that lies in each week, as if it were spent evenly.

    Args:
        began_ns: Begins of the times, shape [times].
        wall_ns: Their lengths, shape [times].
        weeks: First and last week that count.
    """
    ended_ns = began_ns + wall_ns
    first = np.maximum(week_of(began_ns), weeks[0])
    counts = np.maximum(np.minimum(week_of(ended_ns), weeks[1]) - first + 1, 0)
    index = np.repeat(np.arange(len(counts)), counts)
    week = np.arange(len(index)) + (first - np.cumsum(counts) + counts)[index]
    begin_ns = week_begin_ns(week)
    inside_ns = np.minimum(ended_ns[index], begin_ns + WEEK_NS) - np.maximum(began_ns[index], begin_ns)
    own_ns = wall_ns[index]
    share = np.where(own_ns > 0, inside_ns / np.maximum(own_ns, 1), 1.0)
    positive = share > 0
    return WeekShares(index[positive], week[positive], share[positive])


class Numbers(dict[Any, int]):
    """Numbers of keys in the order in which they are first looked up."""

    def __missing__(self, key: Any) -> int:
        """Number a new key."""
        self[key] = number = len(self)
        return number


class PartColumns:
    """The names of all parts that were seen, each with a column."""

    def __init__(self) -> None:
        self._numbers = Numbers()

    @property
    def names(self) -> list[str]:
        """The names, in the order of their columns."""
        return list(self._numbers)

    def table(self, parts: Sequence[dict[str, float]]) -> Floats:
        """Return the times of some parts, shape [rows, columns]; 0 where a row lacks a part."""
        row = np.repeat(np.arange(len(parts)), list(map(len, parts)))
        column = list(map(self._numbers.__getitem__, chain.from_iterable(parts)))
        result = np.zeros((len(parts), len(self._numbers)))
        result[row, column] = list(chain.from_iterable(map(dict.values, parts)))
        return result

    def where(self, condition: Any) -> Ints:
        """Return the columns of the parts that fulfil a condition."""
        return np.array([column for part, column in self._numbers.items() if condition(part)], np.int64)


@dataclass(frozen=True)
class Sum:
    """Rank time of some runs, in ns, by part of the account."""

    runs: int
    parts: Mapping[str, float]

    @property
    def rank_ns(self) -> float:
        """Rank time."""
        return sum(self.parts.values())

    @property
    def lost_ns(self) -> float:
        """Rank time that is lost, as an account has it: time that is not known counts."""
        return sum(ns for part, ns in self.parts.items() if is_lost(part))

    @property
    def goodput(self) -> float | None:
        """Time in steps that no restart repeated, over the known rank time; None if nothing is known."""
        known_ns = self.rank_ns - self.parts.get(NOT_KNOWN, 0.0)
        return sum(ns for part, ns in self.parts.items() if is_productive(part)) / known_ns if known_ns > 0 else None


class GroupSums:
    """Sums of groups of rows. A group is a number; a row has the parts of an account, and belongs to a run."""

    def __init__(self) -> None:
        self._runs: Ints = np.zeros(0, np.int64)
        self._ns: Floats = np.zeros((0, 0))

    def add(self, group: Ints, run: Ints, parts_ns: Floats) -> None:
        """Add rows. All rows of a run must be added at once.

        Args:
            group: Group of each row, shape [rows].
            run: Number of each row's run, shape [rows].
            parts_ns: Time of each row, shape [rows, parts]; later calls may have more parts.
        """
        if not len(group):
            return
        groups, parts = max(len(self._runs), int(group.max()) + 1), parts_ns.shape[1]
        cell = (group[:, None] * parts + np.arange(parts)).ravel()
        ns = np.bincount(cell, parts_ns.ravel(), groups * parts).reshape(groups, parts).astype(float, copy=False)
        ns[: self._ns.shape[0], : self._ns.shape[1]] += self._ns
        count = int(run.max()) + 1
        runs = np.bincount(np.unique(group * count + run) // count, minlength=groups)
        runs[: len(self._runs)] += self._runs
        self._ns, self._runs = ns, runs

    def sums(self, parts: Sequence[str]) -> list[Sum]:
        """Return the sums by group; a group without rows has no runs.

        Args:
            parts: Name of each part.
        """
        rows = zip(self._runs.tolist(), self._ns.tolist(), strict=True)
        return [Sum(runs, dict(zip(parts, ns, strict=False))) for runs, ns in rows]
