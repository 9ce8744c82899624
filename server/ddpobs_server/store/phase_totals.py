"""Each rank's steps, communication and phases over a whole attempt, without adding up all of it at each scrape."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import CTE, Connection, case, select

from ddpobs import wire
from ddpobs_server.store import schema
from ddpobs_server.store.aggregate_queries import added
from ddpobs_server.store.rows import Run

NAMES = ("steps", "comm_ns", *(f"{phase}_ns" for phase in wire.PHASES))
Sums = dict[int, tuple[int, ...]]
"""By rank, in the order of `NAMES`."""
_EVERY, _BEHIND = 8, 4
"""Windows are kept added up, so many at a time, when all ranks are so many further."""
_SILENT_NS = 60 * 10**9
"""A rank whose latest step came so much earlier than others' holds nobody up."""
LastSeen = Sequence[tuple[str, int, int, int, int]]
"""As `sums.last_seen` gives it."""


@dataclass
class _Past:
    """Sums of the windows before `until`."""

    until: int = 0
    sums: Sums = field(default_factory=dict)


class PhaseTotals:
    """Adds what is recent to what is past, and looks at the past again where the histogram of steps disagrees."""

    def __init__(self) -> None:
        self._past: dict[tuple[str, str], _Past] = {}
        self._lock = threading.Lock()

    def read(
        self, connection: Connection, of: CTE, runs: list[Run], steps: dict[str, int], last_seen: LastSeen
    ) -> dict[str, Sums]:
        """Sums by run.

        Args:
            connection: Shows one state of the database throughout.
            of: The sources of the runs.
            runs: Runs, whose latest attempts are meant.
            steps: By run: how many steps all its ranks' histograms count, in that state.
            last_seen: How far each of their ranks is, likewise.
        """
        with self._lock:
            known = {run.run: self._past.get((run.run, run.attempt), _Past()) for run in runs}
            self._past = {(run.run, run.attempt): known[run.run] for run in runs}
            recent = _summed(connection, of, {run: (past.until, None) for run, past in known.items()})
            totals = {run: _added(past.sums, recent.get(run, {})) for run, past in known.items()}
            # A batch that came late changed what was past.
            wrong = [run for run in totals if sum(row[0] for row in totals[run].values()) != steps.get(run, 0)]
            if wrong:
                anew = _summed(connection, of, dict.fromkeys(wrong, (0, None)))
                for run in wrong:
                    totals[run], known[run].until, known[run].sums = anew.get(run, {}), 0, {}
            self._go_on(connection, of, _reached(last_seen), known)
            return totals

    def _go_on(self, connection: Connection, of: CTE, reached: dict[str, int], known: dict[str, _Past]) -> None:
        until = {run: (step // schema.ROLLUP_STEPS - _BEHIND) // _EVERY * _EVERY for run, step in reached.items()}
        further = {run: (past.until, until[run]) for run, past in known.items() if until.get(run, 0) > past.until}
        if further:
            grown = _summed(connection, of, further)
            for run in further:
                known[run].until, known[run].sums = until[run], _added(known[run].sums, grown.get(run, {}))


def _reached(last_seen: LastSeen) -> dict[str, int]:
    """By run: the last step of the slowest rank, which with uneven inputs is ever further behind the others."""
    newest_ns: dict[str, int] = {}
    for run, _, _, at_ns, _ in last_seen:
        newest_ns[run] = max(at_ns, newest_ns.get(run, 0))
    reached: dict[str, int] = {}
    for run, _, step, at_ns, _ in last_seen:
        if at_ns >= newest_ns[run] - _SILENT_NS:
            reached[run] = min(step, reached.get(run, step))
    return reached


def _summed(connection: Connection, of: CTE, windows: Mapping[str, tuple[int, int | None]]) -> dict[str, Sums]:
    """Sums over windows [begin, end) by run; only of those runs."""
    if not windows:
        return {}
    c, run = schema.rollups.c, of.c.run_id
    begin = case({name: begin for name, (begin, _) in windows.items()}, value=run, else_=2**62)
    query = (
        select(run, of.c.rank, *(added(c[name]) for name in NAMES))
        .join(schema.rollups, (c.run_id == run) & (c.source == of.c.source) & (c.step_window >= begin))
        .group_by(run, of.c.rank)
    )
    ends = {name: end for name, (_, end) in windows.items() if end is not None}
    if ends:
        query = query.where(c.step_window < case(ends, value=run, else_=2**62))
    found: dict[str, Sums] = {}
    for name, rank, *row in connection.execute(query):
        found.setdefault(name, {})[rank] = tuple(map(int, row))
    return found


def _added(some: Sums, others: Sums) -> Sums:
    nothing = (0,) * len(NAMES)
    return {
        rank: tuple(a + b for a, b in zip(some.get(rank, nothing), others.get(rank, nothing), strict=True))
        for rank in some.keys() | others.keys()
    }
