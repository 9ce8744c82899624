"""Steps and bucket spans of all ranks on one clock: as columns, and as a trace."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.steps import clock_alignment
from ddpobs_server.analysis.trace import chrome_trace
from ddpobs_server.reports.attempt_reader import AttemptReader

_TRACE_STEPS, _TRACE_EVENTS = 50, 100_000
_CLOCK_ROWS = 500_000
"""Maximum rows that are read around the requested steps to align clocks."""
_NOISE_STEPS, _NOISE_ROWS = 200, 50_000


class TooManyStepsError(ValueError):
    """More steps are requested than fit into a response; the steps up to `fits_until` would fit."""

    def __init__(self, fits_until: int) -> None:
        super().__init__(f"one response holds the steps up to {fits_until}")
        self.fits_until = fits_until


class RunTimeline(AttemptReader):
    """Reads the steps and spans of one attempt, and aligns its ranks' clocks."""

    def aligned_spans(
        self,
        rank: int | None,
        first: int | None,
        last: int | None,
        *,
        module: int | None = None,
    ) -> dict[str, wire.Ints]:
        """Return columns of bucket spans, with ready, launched and done also on the lowest rank's clock."""
        _, (ranks, spans), offsets = self._on_one_clock(first, last)
        selected = np.ones(len(ranks), bool)
        if rank is not None:
            selected &= ranks == rank
        if module is not None:
            selected &= spans.module == module
        columns = {"rank": ranks} | spans.by_name()
        for name in ("ready", "launched", "done"):
            columns[f"aligned_{name}_ns"] = clock_alignment.align(ranks, offsets, columns[f"{name}_ns"])
        return {name: values[selected] for name, values in columns.items()}

    def trace(self, first: int | None, last: int | None) -> dict[str, Any]:
        """Return a Chrome trace of the steps in [first, last].

        If either end is open, the trace holds `_TRACE_STEPS`, or as many as fit. About `_TRACE_EVENTS` fit; a single
        step is always whole.

        Raises:
            TooManyStepsError: Both ends are set, and the steps between them do not fit into one trace.
        """
        begin, end = first, last
        if begin is None:
            end = end if end is not None else self._last_step()
            begin = max(0, end - _TRACE_STEPS + 1)
        elif end is None:
            end = begin + _TRACE_STEPS - 1
        assert end is not None
        if (cut := self._trace_end(begin, end)) is not None:
            if first is not None and last is not None:
                raise TooManyStepsError(cut)
            # With an open start the latest steps are returned.
            begin, end = (end - (cut - begin), end) if first is None else (begin, cut)
        sources = self.store.sources(self.run, self.attempt)
        anchor = min(sources, key=lambda source: source.rank).anchor if sources else None
        wall_offset_ns = None if anchor is None else anchor.wall_ns - anchor.monotonic_ns
        layouts = self.store.layouts(self.run, self.attempt)[0]
        events = self.store.first_events(self.run, self.attempt)
        changes = [(rank, event) for rank, event in events if event.kind.startswith(chrome_trace.BUCKET_CHANGES)]
        steps_and_spans = self._on_one_clock(begin, end)
        return chrome_trace.chrome_trace(*steps_and_spans, layouts, wall_offset_ns, changes_of_buckets=changes)

    def noise_ns(self, last: int) -> int:
        """Return how far apart the ranks end one all-reduce on aligned clocks, measured on some of the latest spans."""
        first = max(last - _NOISE_STEPS, 0)
        end = self.store.page_end("spans", self.run, self.attempt, first=first, last=last, rows=_NOISE_ROWS)
        last = last if end is None else end
        steps = self.store.steps(self.run, self.attempt, None, first, last)
        return clock_alignment.offsets_ns(steps, self.store.spans(self.run, self.attempt, None, first, last))[1]

    def _trace_end(self, first: int, last: int) -> int | None:
        """Return the last step that fits into a trace, None if all do.

        Each kind of rows has its share of the events.
        """
        if first == last:
            return None
        rows = self._rows(first, last)
        events = sum(count * chrome_trace.EVENTS[kind] for kind, count in rows.items())
        if events > _TRACE_EVENTS:
            rows = {kind: count * _TRACE_EVENTS // events for kind, count in rows.items()}
        else:
            rows = dict.fromkeys(rows, _TRACE_EVENTS)
        cuts = [
            self.store.page_end(kind, self.run, self.attempt, first=first, last=last, rows=limit)
            for kind, limit in rows.items()
        ]
        return min((cut for cut in cuts if cut is not None), default=None)

    def _rows(self, first: int, last: int) -> dict[str, int]:
        """Estimate the rows of each kind that a trace shows."""
        kinds = chrome_trace.EVENTS
        return {kind: self.store.estimate_rows(kind, self.run, self.attempt, first, last) for kind in kinds}

    def _on_one_clock(
        self, first: int | None, last: int | None
    ) -> tuple[tuple[wire.Ints, wire.Steps], tuple[wire.Ints, wire.Spans], dict[int, int]]:
        """Return steps and spans of [first, last] with their ranks, and the offsets to the lowest rank's clock.

        If the ranks share too few collectives in these steps, the offsets are computed from the steps around as well.
        """
        steps, spans = self._read(first, last)
        shared = steps, spans
        if margin := clock_alignment.steps_to_add(steps):
            begin, end = max(0, int(steps[1].step[0]) - margin), int(steps[1].step[-1]) + margin
            if sum(self._rows(begin, end).values()) <= _CLOCK_ROWS:
                shared = self._read(begin, end)
        return steps, spans, clock_alignment.offsets_ns(*shared)[0]

    def _read(
        self, first: int | None, last: int | None
    ) -> tuple[tuple[wire.Ints, wire.Steps], tuple[wire.Ints, wire.Spans]]:
        of_attempt = self.run, self.attempt, None, first, last
        return self.store.steps(*of_attempt), self.store.spans(*of_attempt)

    def _last_step(self) -> int:
        return max((source.last_step for source in self.store.sources(self.run, self.attempt)), default=0)
