"""Read the steps that a diagnosis judges: all of a short run, the latest and the rollups of a long run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.slow_ranks.lateness_bins import LatenessBins
from ddpobs_server.analysis.steps.intervals import StepClock
from ddpobs_server.analysis.steps.joined_steps import index_ranks
from ddpobs_server.analysis.steps.step_bins import StepBins
from ddpobs_server.reports import recent_steps
from ddpobs_server.reports.read_bins import AttemptBins, Shown, read_lateness, read_stored_bins, unix_times
from ddpobs_server.reports.recent_steps import drop_silent_ranks, read_recent_steps
from ddpobs_server.store import Source, Store

WHOLE_ROWS = 150_000
"""Rows up to which all judged steps are read."""
_TIMES = 1000
"""Bins of the steps before the latest, by which these are dated."""
_NO_STEPS = np.zeros(0, np.int64)
Rows = tuple[wire.Ints, wire.Steps]


@dataclass(frozen=True)
class JudgedSteps:
    """Rows of the judged steps, sorted by step and rank.

    Attributes:
        rank: Rank of each row of the latest steps.
        steps: Their columns.
        whole: Ranks and columns of all judged steps; None if they are the latest steps.
        earlier: Lateness in the judged steps before, from bins; None if there is none.
        earlier_times: The same steps in bins over all ranks, with times of day.
    """

    rank: wire.Ints
    steps: wire.Steps
    whole: Rows | None = None
    earlier: LatenessBins | None = None
    earlier_times: StepBins | None = None

    @classmethod
    def none(cls) -> JudgedSteps:
        """Return no steps."""
        return cls(_NO_STEPS, wire.Steps.from_table(np.zeros((len(wire.Steps.names), 0), np.int64)))

    @property
    def all_rows(self) -> Rows:
        """Ranks and columns of all judged steps that were read."""
        return self.whole or (self.rank, self.steps)

    @property
    def first(self) -> int:
        """First judged step; 0 without one."""
        bins = self.earlier_times
        first = np.concatenate([self.all_rows[1].step, *([] if bins is None else [bins.column("first")])])
        return int(first.min()) if len(first) else 0

    def without_silent_ranks(self, sources: list[Source]) -> JudgedSteps:
        """Return the rows without silent ranks: with them no recent step could be compared."""
        rank, steps = drop_silent_ranks(self.rank, self.steps, sources)
        if len(rank) == len(self.rank):
            return self
        judged = replace(self, rank=rank, steps=steps)
        if self.whole is None:
            return judged
        return replace(judged, whole=_selected(self.whole, np.isin(self.whole[0], index_ranks(rank)[0])))

    def clock(self, sources: list[Source]) -> StepClock:
        """Return when the steps of the lowest rank began and ended, on that rank's wall clock."""
        rank, steps = self.all_rows
        if not len(rank):
            return StepClock()
        lowest = int(rank.min())
        offsets = [s.anchor.wall_ns - s.anchor.monotonic_ns for s in sources if s.rank == lowest]
        if not offsets:
            return StepClock()
        _, rows = _selected((rank, steps), rank == lowest)
        columns = [(rows.step, rows.start_ns + offsets[-1], rows.end_ns + offsets[-1])]
        if (bins := self.earlier_times) is not None:
            bins = bins.select(np.flatnonzero(bins.column("last") < rows.step[0]))
            columns.insert(0, (bins.column("first"), bins.column("began_ns"), bins.column("ended_ns")))
        return StepClock(*(np.concatenate(parts) for parts in zip(*columns, strict=True)))


def read_judged_steps(
    store: Store, run: str, attempt: str, sources: list[Source], bounds: tuple[int | None, int | None]
) -> JudgedSteps:
    """Read the steps between `bounds`, both included; None leaves that end open.

    Raises:
        TooManyRowsError: One step has too many rows.
    """
    last_steps = {source.rank: source.last_step for source in sources}
    highest = max(last_steps.values(), default=0)
    first, last = bounds[0] or 0, highest if bounds[1] is None else min(bounds[1], highest)
    if first > last:
        return JudgedSteps.none()
    whole = None
    most_rows = len(sources) * (last - first + 1)
    if most_rows <= WHOLE_ROWS or store.estimate_rows("steps", run, attempt, first, last) <= WHOLE_ROWS:
        whole = store.steps(run, attempt, None, first, last)
        latest = _latest(whole, {rank: min(step, last) for rank, step in last_steps.items()})
    elif last == highest:
        rank, steps = read_recent_steps(store, run, attempt, sources)
        latest = _selected((rank, steps), steps.step >= first)
    else:
        window = max(1, min(recent_steps.STEPS, WHOLE_ROWS // max(1, len(last_steps))))
        latest = store.steps(run, attempt, None, max(first, last - window + 1), last)
    read = latest if whole is None else whole
    judged = JudgedSteps(*latest, whole=whole if len(latest[0]) < len(read[0]) else None)
    if not len(read[0]) or first >= (until := int(read[1].step[0])):
        return judged
    # The columns before are too many, or retention has removed them.
    bins, before = AttemptBins(store, run, attempt), (first, until - 1)
    times = unix_times(read_stored_bins(bins, before, _TIMES, Shown(over=True)), sources)
    return replace(judged, earlier=read_lateness(bins, before, len(sources)), earlier_times=times)


def _latest(rows: Rows, last_steps: dict[int, int]) -> Rows:
    """Return the latest `STEPS` steps of each rank, counted from its own last step."""
    rank, steps = rows
    if not len(rank):
        return rows
    ranks, index = index_ranks(rank)
    first = np.array([last_steps.get(number, 0) - recent_steps.STEPS for number in ranks.tolist()], np.int64)
    return _selected(rows, steps.step > first[index])


def _selected(rows: Rows, mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Rows:
    return rows if mask.all() else (rows[0][mask], rows[1].select(mask))
