"""Data of the pictures of a run: bounded in size, whatever the numbers of ranks and steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.communication.bucket_times import BucketTimes, bucket_times
from ddpobs_server.analysis.communication.transfers import bucket_sizes, transfers
from ddpobs_server.analysis.slow_ranks.delay_map import DelayMap, delay_map
from ddpobs_server.analysis.slow_ranks.lateness import lateness
from ddpobs_server.analysis.slow_ranks.lateness_bins import DelayBins, delays_of
from ddpobs_server.analysis.steps import clock_alignment
from ddpobs_server.analysis.steps.joined_steps import join
from ddpobs_server.analysis.steps.pipeline import within_parts
from ddpobs_server.analysis.steps.step_timeline import BucketSpans, Phases, bucket_spans_of, phases_of
from ddpobs_server.reports.attempt_reader import AttemptReader
from ddpobs_server.reports.read_bins import AttemptBins, read_lateness
from ddpobs_server.reports.recent_steps import drop_silent_ranks
from ddpobs_server.store import Source
from ddpobs_server.store.sums.stored_bins import BIN_STEPS

_COLUMN_ROWS = 400_000
"""Rows of steps up to which the delays are computed from columns."""
_CHOICE_STEPS, _CHOICE_ROWS = 50, 50_000
"""Latest steps from which the shown step is chosen, and about the most rows of them."""
_ALIGNED_STEPS, _ALIGNED_SPANS = 2, 500_000
"""Steps before and after a shown step that are read to align the ranks' clocks, unless they have more spans."""
_SPAN_ROWS = 50_000
"""Maximum number of rows of spans from which the times of buckets are computed."""


@dataclass(frozen=True)
class StepTimeline:
    """One step of the attempt's ranks.

    Attributes:
        step: Its number.
        phases: Phases of each rank.
        spans: Buckets of each rank.
        by_own_time: Ranks whose own time is known, the slowest first.
        delay_ns: Own time of the slowest rank above the other ranks' median.
        typical_of: First and last step among which it has the median delay; None if it was not chosen by its delay.
    """

    step: int
    phases: Phases
    spans: BucketSpans
    by_own_time: list[int]
    delay_ns: int
    typical_of: tuple[int, int] | None


class RunViews(AttemptReader):
    """Reads the data of pictures of one attempt."""

    @cached_property
    def sources(self) -> list[Source]:
        """The attempt's processes."""
        return self.store.sources(self.run, self.attempt)

    def layouts(self) -> list[wire.Layout]:
        """Return the layouts of all modules that fit into a response."""
        return self.store.layouts(self.run, self.attempt, None)[0]

    def bounds(self, first: int | None, last: int | None) -> tuple[int, int]:
        """Return the first and last of the requested steps that the attempt has."""
        highest = max((source.last_step for source in self.sources), default=0)
        return first or 0, highest if last is None else min(last, highest)

    def delays(self, first: int | None, last: int | None, most: int) -> DelayMap | None:
        """Return the delay that each rank caused, in at most `most` bins of steps; None if none can be compared."""
        (begin, end), sources = self.bounds(first, last), self.sources
        if begin > end:
            return None
        recent, earlier = self._recent_lateness(begin, end, sources), None
        until = end if recent is None else int(recent.first[0]) - 1
        if until - begin >= BIN_STEPS - 1 or recent is None:
            # The columns are too many, or retention has removed the first of them.
            earlier = read_lateness(AttemptBins(self.store, self.run, self.attempt), (begin, until), len(sources))
        if recent is None:
            # Bins are made once a minute: until then the latest steps have to do.
            tail = begin if earlier is None else int(earlier.last[-1]) + 1
            tail = max(tail, end - _COLUMN_ROWS // max(1, len(sources)) + 1)
            recent = self._recent_lateness(tail, end, sources) if tail <= end else None
        parts = [part for part in (earlier, recent) if part is not None and len(part)]
        if not parts:
            return None
        return delay_map(parts[0] if len(parts) == 1 else parts[0].followed_by(parts[1]), most)

    def _recent_lateness(self, first: int, last: int, sources: list[Source]) -> DelayBins | None:
        """Return the lateness by step from columns; None if they are too many, or none can be compared."""
        if self.store.estimate_rows("steps", self.run, self.attempt, first, last) > _COLUMN_ROWS:
            return None
        joined = join(*drop_silent_ranks(*self.store.steps(self.run, self.attempt, None, first, last), sources))
        joined = within_parts(joined, self.parts(sources))
        return delays_of(joined) if len(joined) and len(joined.ranks) > 1 else None

    def timeline(self, step: int | None, first: int | None, last: int | None) -> StepTimeline:
        """Return a step on all ranks: the requested one, or a typical one of the last steps in a range."""
        bounds = self.bounds(first, last)
        typical_of = None
        if step is None:
            step, typical_of = self._typical_step(*bounds)
        near = max(0, step - _ALIGNED_STEPS), step + _ALIGNED_STEPS
        if self.store.estimate_rows("spans", self.run, self.attempt, *near) > _ALIGNED_SPANS:
            near = step, step
        steps, spans = self._steps(*near), self.store.spans(self.run, self.attempt, None, *near)
        offsets, _ = clock_alignment.offsets_ns(steps, spans)
        own_rows, own_spans = steps[1].step == step, spans[1].step == step
        rows = steps[0][own_rows], steps[1].select(own_rows)
        shown = spans[0][own_spans], spans[1].select(own_spans)
        parts = phases_of(rows, offsets), bucket_spans_of(rows, shown, offsets)
        return StepTimeline(step, *parts, *_by_own_time(*rows), typical_of)

    def _typical_step(self, first: int, last: int) -> tuple[int, tuple[int, int] | None]:
        """Return the step of median delay among the latest, and the first and last of them, if any can be compared.

        A single spike says little about the run.
        """
        sources = len(self.sources)
        begin = max(first, last - max(1, min(_CHOICE_STEPS, _CHOICE_ROWS // max(1, sources))) + 1)
        joined = join(*self._steps(begin, last))
        if not len(joined):
            return max(first, last), None
        if len(joined.ranks) < 2:
            return int(joined.step[-1]), None
        delay_ns = lateness(joined).delay_ns
        typical = joined.step[np.argsort(delay_ns, kind="stable")[len(delay_ns) // 2]]
        return int(typical), (int(joined.step[0]), int(joined.step[-1]))

    def buckets(self, first: int | None, last: int | None) -> BucketTimes | None:
        """Return the mean times of each bucket over the latest steps of a range that fit; None without spans."""
        lowest, end = self.bounds(first, last)
        begin = end
        # Twice as many steps again and again: of a long run, few chunks are counted.
        while begin > lowest:
            earlier = max(lowest, end - 2 * (end - begin + 1) + 1)
            if self.store.estimate_rows("spans", self.run, self.attempt, earlier, end) > _SPAN_ROWS:
                break
            begin = earlier
        rank, columns = self.store.spans(self.run, self.attempt, None, begin, end)
        if not len(rank):
            return None
        steps = self._steps(begin, end)
        sizes = bucket_sizes(self.layouts())
        moved = transfers((rank, columns), clock_alignment.collectives_of(steps, rank, columns.step), sizes)
        return bucket_times(columns.step, bucket_spans_of(steps, (rank, columns), {}), sizes, moved.latest_layout)

    def _steps(self, first: int, last: int) -> tuple[wire.Ints, wire.Steps]:
        return self.store.steps(self.run, self.attempt, None, first, last)


def _by_own_time(rank: wire.Ints, steps: wire.Steps) -> tuple[list[int], int]:
    """Return the ranks of one step by own time, and the excess of the slowest."""
    joined = join(rank, steps)
    if not len(joined) or len(joined.ranks) < 2:
        return [], 0
    order = np.argsort(-joined.own_ns[-1], kind="stable")
    return joined.ranks[order].tolist(), round(float(lateness(joined).delay_ns[-1]))
