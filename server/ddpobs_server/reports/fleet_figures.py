"""Figures of the fleet for `/metrics`: of the workspaces that are scraped, made again in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

WEEKS = 12
_MIN_AGE_S, _SHARE = 10.0, 0.01
"""Figures are made again after ten seconds at the earliest, and take at most 1 % of the time."""
_WANTED_S = 600.0
"""Figures that no scrape has asked for so long are forgotten."""


@dataclass(frozen=True)
class FleetOutline:
    """Figures of a workspace over twelve weeks.

    Attributes:
        rank_s: Time of all ranks, in seconds.
        lost_s: Lost time of all ranks by the title of its cause, in seconds.
        late_ratios: Lateness of each slow host in the jobs in which it was the slowest, as a share of a step.
        compared_runs: Runs whose hosts were compared.
    """

    rank_s: float
    lost_s: Mapping[str, float]
    late_ratios: Mapping[str, float]
    compared_runs: int

    @classmethod
    def of(cls, fleet: Mapping[str, Any]) -> FleetOutline:
        """Take the figures from a fleet report."""
        return cls(
            rank_s=3600 * fleet["rank_hours"],
            lost_s={cause["title"]: 3600 * cause["hours"] for cause in fleet["causes"]},
            late_ratios={host["host"]: host["excess_ratio"] for host in fleet["slow_hosts"]},
            compared_runs=fleet["compared_runs"],
        )


@dataclass
class _Entry:
    wanted_s: float
    due_s: float = 0.0
    outline: FleetOutline | None = None


class FleetFigures:
    """The last figures of each workspace that is scraped.

    Args:
        report: Returns the fleet report of a workspace.
        clock: Seconds that never go back.
    """

    def __init__(self, report: Callable[[str], Mapping[str, Any]], clock: Callable[[], float] = time.monotonic) -> None:
        self._report, self._clock = report, clock
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()

    def latest(self, workspace: str) -> FleetOutline | None:
        """Return the last figures, and keep them up to date from now on; None before the first."""
        with self._lock:
            entry = self._entries.setdefault(workspace, _Entry(0.0))
            entry.wanted_s = self._clock()
            return entry.outline

    def refresh(self) -> None:
        """Make the figures again that are due. A workspace that fails waits, and holds up no other.

        Raises:
            UnavailableError: The database does not answer.
        """
        began_s = self._clock()
        with self._lock:
            for workspace in [name for name, entry in self._entries.items() if began_s - entry.wanted_s > _WANTED_S]:
                del self._entries[workspace]
            due = [(name, entry) for name, entry in self._entries.items() if began_s >= entry.due_s]
        for workspace, entry in due:
            started_s = self._clock()
            entry.due_s = started_s + _MIN_AGE_S
            entry.outline = FleetOutline.of(self._report(workspace))
            ended_s = self._clock()
            entry.due_s = ended_s + max(_MIN_AGE_S, (ended_s - started_s) / _SHARE)
