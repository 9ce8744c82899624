"""Columns of one attempt's steps: by step, in bins, and with each rank's lateness."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.slow_ranks.lateness import lateness_table
from ddpobs_server.analysis.steps.joined_steps import join, mean_over_ranks
from ddpobs_server.analysis.steps.pipeline import within_parts
from ddpobs_server.analysis.steps.step_bins import SHOWN, StepBins
from ddpobs_server.reports.attempt_reader import AttemptReader
from ddpobs_server.reports.read_bins import AttemptBins, Shown, read_step_bins, unix_times
from ddpobs_server.reports.recent_steps import drop_silent_ranks, read_recent_steps
from ddpobs_server.reports.timeline import RunTimeline

_BIN_ROWS = 25_000
"""Approximate limit of rows of bins in a response."""
_ROWS = 500_000
"""Approximate limit of step rows in a response."""


class RunColumns(AttemptReader):
    """Reads the columns of one attempt."""

    def stragglers(self, first: int | None, last: int | None) -> dict[str, Any]:
        """Return own times of all ranks by step, the last rank, and each rank's share and excess.

        In a pipeline these are compared within each stage, else within each process group.

        Without `first` and `last` the latest steps are used. Otherwise the response holds as many steps from `first` on
        as fit, and `next` is the first step of the next response. `own_ns` and `excess_ns` are arrays, and `per_rank`
        is an iterator, for a response that is encoded in parts.
        """
        end, sources = None, self.store.sources(self.run, self.attempt)
        if first is None and last is None:
            rank, steps = drop_silent_ranks(*read_recent_steps(self.store, self.run, self.attempt, sources), sources)
        else:
            end = self.store.page_end("steps", self.run, self.attempt, first=first, last=last, rows=_ROWS)
            rank, steps = self.store.steps(self.run, self.attempt, None, first, last if end is None else end)
        joined = within_parts(join(rank, steps), self.parts(sources))
        table: dict[str, Any] = {
            "run": self.run,
            "attempt": self.attempt,
            "steps": joined.step.tolist(),
            "ranks": joined.ranks.tolist(),
            "own_ns": joined.own_ns.astype(np.int64),
            "excess_ns": np.zeros(joined.own_ns.shape, np.int64),  # A single rank has no excess.
            "delay_ns": [],
            "last_rank": [],
            "noise_ns": 0,
            "per_rank": iter(()),
            "next": None if end is None else end + 1,
        }
        if len(joined) and len(joined.ranks) > 1:
            table |= lateness_table(joined)
            table["noise_ns"] = RunTimeline(self.store, self.run, self.attempt).noise_ns(int(joined.step[-1]))
        return table

    def mean_steps(self, first: int | None, last: int | None) -> tuple[dict[str, wire.Ints], int | None]:
        """Return wall time and phases by step, the mean over its ranks, and the next page's first step or None."""
        end = self.store.page_end("steps", self.run, self.attempt, first=first, last=last, rows=_ROWS)
        _, steps = self.store.steps(self.run, self.attempt, None, first, last if end is None else end)
        return mean_over_ranks(steps), None if end is None else end + 1

    def step_bins(
        self,
        bounds: tuple[int | None, int | None],
        points: int,
        rank: int | None,
        *,
        mean: bool,
    ) -> tuple[dict[str, wire.Ints], int | None]:
        """Return at most `points` bins of steps: each rank's, one rank's, or over all ranks.

        If ranks times bins do not fit into a response, it has the first bins; the second result is the next step then.
        """
        sources = self.store.sources(self.run, self.attempt)
        highest = max((source.last_step for source in sources), default=0)
        first, last = bounds[0] or 0, highest if bounds[1] is None else min(bounds[1], highest)
        next_step = None
        fitting = points if mean or rank is not None else max(1, _BIN_ROWS // max(1, len(sources)))
        if fitting < points:
            end = first + -(-(last - first + 1) // points) * fitting - 1
            next_step, last, points = (end + 1 if end < last else None), min(end, last), fitting
        bins = StepBins.concat([])
        if first <= last:
            bins = read_step_bins(
                AttemptBins(self.store, self.run, self.attempt), (first, last), points, Shown(rank, mean)
            )
        if next_step is not None and len(bins):
            next_step = int(bins.column("last").max()) + 1  # Stored bins may be wider than requested.
        bins = unix_times(bins, sources)
        return {name: bins.column(name) for name in SHOWN if name != "rank" or not mean}, next_step
