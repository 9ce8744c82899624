"""Sums of rank time: by week, host, tag and version of torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ddpobs_server.analysis.account.parts import is_lost, is_productive

DAY_NS = 86_400 * 10**9
WEEK_NS = 7 * DAY_NS
_MONDAY_NS = 4 * DAY_NS
"""The first Monday of Unix time, which begins on a Thursday."""


def week_of(at_ns: int) -> int:
    """Return the number of the week of a time; weeks begin on Mondays, 0:00 UTC."""
    return (at_ns - _MONDAY_NS) // WEEK_NS


def week_begin_ns(week: int) -> int:
    """Return the begin of a week as Unix time, in ns."""
    return week * WEEK_NS + _MONDAY_NS


def week_shares(began_ns: int, wall_ns: int, weeks: tuple[int, int]) -> Iterator[tuple[int, float]]:
    """Return the share of a time that lies in each week, as if it were spent evenly.

    Args:
        began_ns: Begin of the time.
        wall_ns: Its length.
        weeks: First and last week that count.
    """
    first = max(weeks[0], week_of(began_ns))
    for week in range(first, min(weeks[1], week_of(began_ns + wall_ns)) + 1):
        begin_ns = week_begin_ns(week)
        inside_ns = min(began_ns + wall_ns, begin_ns + WEEK_NS) - max(began_ns, begin_ns)
        if (share := inside_ns / wall_ns if wall_ns > 0 else 1.0) > 0:
            yield week, share


@dataclass
class Sum:
    """Rank time of some runs, in ns, by part of the account."""

    runs: int = 0
    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _last_run: str = ""

    def add(self, run: str, parts: Mapping[str, float], share: float) -> None:
        """Add a share of some parts. All parts of a run must be added before the next run."""
        if run != self._last_run:
            self.runs += 1
            self._last_run = run
        for part, ns in parts.items():
            self.parts[part] += ns * share

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
        known_ns = self.rank_ns - self.parts.get("not_known", 0.0)
        return sum(ns for part, ns in self.parts.items() if is_productive(part)) / known_ns if known_ns > 0 else None
